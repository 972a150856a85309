//! The environment variables that the crates read, and detection of misspelt names.

use std::env;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// The crate or program that reads a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VariableReader {
    /// The safe layer, and the code that loads CANN's libraries for it.
    Library,
    /// The emulation of CANN, in process or as a shared library.
    Emulation,
    /// The program `ascend-attn`, in its command `doctor`.
    Doctor,
    /// The tests of these crates.
    Tests,
}

/// An environment variable that one of the crates reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EnvironmentVariable {
    /// The variable's name.
    pub name: &'static str,
    /// The crate or program that reads it.
    pub reader: VariableReader,
    /// Which values are allowed, in Markdown.
    pub values: &'static str,
    /// What applies if the variable is not set or empty, in Markdown.
    pub default: &'static str,
    /// What the variable decides, in Markdown.
    pub meaning: &'static str,
}

macro_rules! variables {
    ($( $name:literal $reader:ident, $values:literal, $default:literal, $meaning:literal; )*) => {
        /// Every environment variable that these crates read. An empty value counts as not set. A value that is not
        /// allowed is refused with the allowed ones by the first call that needs it: `Runtime::auto` for
        /// `ASCEND_PLATFORM`, `aclInit` for those of the emulation, which are read once, at the first call.
        ///
        /// | variable | values | default | what it decides |
        /// |---|---|---|---|
        $( #[doc = concat!("| `", $name, "` | ", $values, " | ", $default, " | ", $meaning, " |")] )*
        pub const VARIABLES: &[EnvironmentVariable] = &[ $( EnvironmentVariable {
            name: $name,
            reader: VariableReader::$reader,
            values: $values,
            default: $default,
            meaning: $meaning,
        }, )* ];
    };
}

variables! {
    "ASCEND_PLATFORM" Library, "`auto`, `npu`, `emulated`", "`auto`",
        "which platform `Runtime::auto` chooses: `auto` is an NPU where there is one, otherwise the emulation";
    "ASCEND_HOME_PATH" Library, "a folder", "the loader's search path",
        "the CANN toolkit whose libraries are loaded; its `set_env.sh` sets it";
    "ASCEND_TOOLKIT_HOME" Library, "a folder", "none",
        "a second folder of a toolkit, looked into behind `ASCEND_HOME_PATH`";
    "ASCEND_OPP_PATH" Library, "a folder", "none",
        "the folder of operator packages, whose vendors' libraries are looked into before CANN's own";
    "ASCEND_CUSTOM_OPP_PATH" Library, "folders between colons, each of one operator package", "none",
        "operator packages that are looked into before those of `ASCEND_OPP_PATH`, the first before the others; the \
         library is in `op_api/lib` of each";
    "ASCEND_RECORD" Library, "a folder, which is made", "nothing is recorded",
        "where calls that are refused or fail are written as case files; the emulation as a shared library writes each \
         call of FusedInferAttentionScore";
    "ASCEND_EMU_SOC" Emulation,
        "a chip that the release knows, such as `Ascend910B3`, `Ascend910_9391`, `Ascend950PR_9599`",
        "`Ascend910B3`", "the emulated product";
    "ASCEND_EMU_CANN" Emulation,
        "`8.1` (8.2 to 8.4 count as it), `8.5`, `9.0`, `9.1`, `9.2` (a preview)", "the newest release, `9.1`",
        "the release of CANN whose operators are emulated";
    "ASCEND_EMU_OPERATOR" Emulation, "`V1` to `V5`", "that of the release",
        "the newest version of FusedInferAttentionScore; newer ones are missing";
    "ASCEND_EMU_STRIDED" Emulation, "`copy`, `refuse`", "`refuse`",
        "what V1 to V4 of FusedInferAttentionScore do with strided keys on Atlas A2 and A3 in 9.1, of which the \
         sources of that release say both (`tensor.contiguous`)";
    "ASCEND_EMU_CHECK" Emulation, "`compat`, `strict`, `strict,-KIND,...`", "`compat`",
        "what becomes of misuse that hardware lets pass, races among it: `compat` warns on stderr and goes on, \
         `strict` makes an error of it, except for the kinds of findings named behind a `-`";
    "ASCEND_EMU_POISON" Emulation, "`0`, `1`", "`0`, zeros",
        "whether device memory is handed out full of NaN in `compat` too, as always in `strict`";
    "ASCEND_EMU_LINTS" Emulation, "`off`, `warn`, `error`",
        "`warn` in the shared library, `off` in process, where the safe layer asks",
        "what becomes of calls that an operator misreads (lints); those that overrun are errors in `strict` too";
    "ASCEND_EMU_DEVICES" Emulation, "1 to 64", "2", "the number of devices";
    "ASCEND_EMU_MEMORY" Emulation, "4096 to 2^44", "what the reserved addresses hold, 64 GiB at most",
        "bytes of memory of each device, and of all pinned host memory (`aclrtMallocHost`)";
    "ASCEND_EMU_THREADS" Emulation, "1 to 1024", "the machine's",
        "threads that operators compute on, shared by all streams";
    "ASCEND_EMU_SIMD" Emulation, "one that the machine has of `avx512`, `avx2`, `neon`, `portable`", "the best",
        "the instruction set that operators compute with";
    "ASCEND_EMU_COLLECTIVE_TIMEOUT" Emulation, "1 to 7200", "60",
        "seconds that a rank of a communicator waits for the others, at its beginning and in each collective";
    "HCCL_CONNECT_TIMEOUT" Emulation, "1 to 7200", "120",
        "seconds that root information is good without a rank that joins by it; on hardware, where it is at least 120, \
         how long ranks wait for each other at the beginning: here that is `ASCEND_EMU_COLLECTIVE_TIMEOUT`";
    "ASCEND_EMU_FAULT" Emulation, "as in `malloc:3=207001,launch:1=507015,sync:2=507014`", "none",
        "faults on demand: which call of a kind fails, and with which status";
    "ASCEND_EMU_TRACE" Emulation, "a file", "none",
        "where each call of a C function is appended as a line of JSON";
    "ASCEND_RT_VISIBLE_DEVICES" Doctor, "numbers of devices between commas", "all",
        "CANN's own: which NPUs the process sees";
    "ASCEND_DRIVER_PATH" Doctor, "a folder", "`/usr/local/Ascend/driver`", "the NPU's driver";
    "ASCEND_TEST_PLATFORM" Tests, "`emulated`, `npu`", "`emulated`",
        "whether the tests run on the emulation in their own process, or on what the loader finds";
    "ASCEND_TEST_CHILD" Tests, "any", "not set", "set by tests for processes that they start";
    "ASCEND_VECTORS" Tests, "a folder", "none", "golden cases besides the repository's own";
}

/// Variables of CANN, its tools and PyTorch's extension, which these crates ignore.
const FOREIGN: [&str; 37] = [
    "ASCEND_AICPU_PATH",
    "ASCEND_ALLOW_LINK",
    "ASCEND_CACHE_PATH",
    "ASCEND_COREDUMP_SIGNAL",
    "ASCEND_CUSTOM_PATH",
    "ASCEND_DEVICE_ID",
    "ASCEND_DUMP_PATH",
    "ASCEND_DUMP_SCENE",
    "ASCEND_ENGINE_PATH",
    "ASCEND_GLOBAL_EVENT_ENABLE",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "ASCEND_GLOBAL_TRACE_ENABLE",
    "ASCEND_HOME",
    "ASCEND_HOST_LOG_FILE_NUM",
    "ASCEND_INSTALL_PATH",
    "ASCEND_LATEST_INSTALL_PATH",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_LOG_DEVICE_FLUSH_TIMEOUT",
    "ASCEND_LOG_SAVE_MODE",
    "ASCEND_LOG_SYNC_SAVE",
    "ASCEND_MAX_OP_CACHE_SIZE",
    "ASCEND_MODULE_LOG_LEVEL",
    "ASCEND_NNAE_PATH",
    "ASCEND_NPU_PHY_ID",
    "ASCEND_OPP_DEBUG_PATH",
    "ASCEND_PATH",
    "ASCEND_PROCESS_LOG_PATH",
    "ASCEND_REMAIN_CACHE_SIZE_RATIO",
    "ASCEND_RUNTIME_OPTIONS",
    "ASCEND_SLOG_LEVEL",
    "ASCEND_SLOG_PRINT_TO_STDOUT",
    "ASCEND_TENSOR_COMPILER_INCLUDE",
    "ASCEND_TENSOR_COMPILER_LIB",
    "ASCEND_TOOLKIT_PATH",
    "ASCEND_USE_FIA",
    "ASCEND_VISIBLE_DEVICES",
    "ASCEND_WORK_PATH",
];

/// A variable that is set, whose name begins with `ASCEND_`, and that no known program reads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownVariable {
    /// The variable's name.
    pub name: String,
    /// The variable that was probably meant, judging by the name.
    pub meant: Option<&'static str>,
}

impl UnknownVariable {
    /// Looks a name up; `None` for names that do not begin with `ASCEND_`, and for known ones.
    pub fn of(name: &str) -> Option<Self> {
        let upper = name.to_uppercase();
        let own = upper.strip_prefix(PREFIX)?;
        if VARIABLES.iter().any(|known| known.name == name) || FOREIGN.contains(&name) {
            return None;
        }
        // `ASCEND_CHECK` and `ASCEND_EMU_CHEK` both stand for `ASCEND_EMU_CHECK`.
        let distance = |known: &str| {
            let known = known.strip_prefix(PREFIX).unwrap_or(known);
            let shortened = known.split_once('_').map(|(_, last)| last);
            match Some(own) == shortened {
                true => 1,
                false => strsim::damerau_levenshtein(own, known),
            }
        };
        let near = VARIABLES.iter().map(|known| (distance(known.name), known.name));
        let nearest = near.min_by_key(|(distance, _)| *distance);
        Some(Self {
            name: name.to_owned(),
            meant: nearest.and_then(|(distance, name)| (distance <= MOST_EDITS).then_some(name)),
        })
    }

    /// Whether the variable can only have been meant for these crates: its name is close to that of one of their
    /// variables, or begins like those of the emulation.
    pub fn is_misspelt(&self) -> bool {
        self.meant.is_some() || self.name.to_uppercase().starts_with("ASCEND_EMU")
    }
}

impl fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An environment may contain any bytes.
        let name = self.name.escape_debug();
        match self.meant {
            Some(meant) => write!(f, "{name} is set, and nothing reads it: did you mean {meant}?"),
            None => write!(f, "{name} is set, and nothing reads it"),
        }
    }
}

/// The prefix of all variables' names.
const PREFIX: &str = "ASCEND_";
/// Most letters that may be added, left out, replaced or exchanged in a name that is still recognised.
const MOST_EDITS: usize = 2;

/// The variables of this process that have a value, whose names begin with `ASCEND_`, and that no known program
/// reads; in the order of their names.
pub fn unknown_variables() -> Vec<UnknownVariable> {
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let mut unknown: Vec<_> = set.filter_map(|(name, _)| UnknownVariable::of(&name.to_string_lossy())).collect();
    unknown.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    unknown
}

/// Returns the [unknown variables](unknown_variables) that are [misspelt](UnknownVariable::is_misspelt) to the first
/// caller in this process, so that each is reported once. Returns an empty list to all later callers.
pub fn misspelt_variables_once() -> Vec<UnknownVariable> {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    match REPORTED.swap(true, Ordering::Relaxed) {
        true => Vec::new(),
        false => unknown_variables().into_iter().filter(UnknownVariable::is_misspelt).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::{CUSTOM_OPP, HOMES, OPP};

    fn meant(name: &str) -> Option<&'static str> {
        UnknownVariable::of(name).unwrap().meant
    }

    #[test]
    fn misspelt_names_are_recognised() {
        for (name, want) in [
            ("ASCEND_EMU_CHEK", "ASCEND_EMU_CHECK"),
            ("ASCEND_EMU_CEHCK", "ASCEND_EMU_CHECK"),
            ("ASCEND_EMUCHECK", "ASCEND_EMU_CHECK"),
            ("ascend_emu_check", "ASCEND_EMU_CHECK"),
            ("ASCEND_CHECK", "ASCEND_EMU_CHECK"),
            ("ASCEND_EMU_DEVICE", "ASCEND_EMU_DEVICES"),
            ("ASCEND_PLATFROM", "ASCEND_PLATFORM"),
            ("ASCEND_RECORDS", "ASCEND_RECORD"),
            ("ASCEND_HOME_PATHS", "ASCEND_HOME_PATH"),
        ] {
            assert_eq!(meant(name), Some(want), "{name}");
            let unknown = UnknownVariable::of(name).unwrap();
            assert!(unknown.is_misspelt());
            let said = unknown.to_string();
            assert!(said.contains(name) && said.contains(want), "{said}");
        }
    }

    #[test]
    fn other_names_are_left_alone() {
        for known in VARIABLES {
            assert_eq!(UnknownVariable::of(known.name), None);
        }
        for foreign in FOREIGN.into_iter().chain(["PATH", "ASCENDING", "VLLM_ASCEND_X"]) {
            assert_eq!(UnknownVariable::of(foreign), None);
        }
        // A variable of an unrelated program.
        let unknown = UnknownVariable::of("ASCEND_SCHEDULER_WINDOW").unwrap();
        assert!(unknown.meant.is_none() && !unknown.is_misspelt());
        let unknown = UnknownVariable::of("ASCEND_EMU_STRICTNESS").unwrap();
        assert!(unknown.meant.is_none() && unknown.is_misspelt());
    }

    #[test]
    fn the_list_has_every_name_once_and_what_the_search_reads() {
        let mut names: Vec<_> = VARIABLES.iter().map(|known| known.name).collect();
        names.sort_unstable();
        assert!(names.is_sorted_by(|one, other| one < other), "{names:?}");
        assert!(FOREIGN.is_sorted(), "{FOREIGN:?}");
        for read in HOMES.into_iter().chain([OPP, CUSTOM_OPP]) {
            assert!(names.contains(&read), "{read}");
        }
    }
}
