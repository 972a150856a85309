//! Configuration from the environment variables that [`ascend_sys::VARIABLES`] lists.

use crate::fault_plan::Plan;
use crate::finding_kind::{FindingKind, FindingKinds};
use crate::kernel::Level;
use crate::machine::{Machine, MachineError};
use crate::named_enum::named_enum;
use crate::status::{Failure, Outcome, PARAM_INVALID, failure, warn};
use ascend_spec::ops::fused_infer_attention_score::Version;
use ascend_spec::{Cann, Soc, StridedKeys};
use std::cell::Cell;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

/// How strictly the emulator treats misuse that hardware would let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Warn on stderr and go on where the real runtime would go on.
    Compat,
    /// Every finding is an error of the call that shows it.
    Strict,
    /// As [`Strict`](Check::Strict), but findings of some kinds are only counted: for programs that cannot be mended.
    StrictWithout(FindingKinds),
}

impl Check {
    /// Whether findings are errors, except for the kinds that the mode leaves out.
    pub fn is_strict(self) -> bool {
        self != Check::Compat
    }

    /// Whether findings of a kind are only counted: they are neither errors nor printed.
    pub fn leaves_out(self, kind: FindingKind) -> bool {
        matches!(self, Check::StrictWithout(kinds) if kinds.contains(kind))
    }

    /// The values of `ASCEND_EMU_CHECK`.
    fn allowed() -> String {
        let kinds: Vec<_> = FindingKind::ALL.iter().map(|kind| kind.name()).collect();
        format!(
            "compat, strict, or strict without some kinds of findings, such as `strict,-pageable_copy,-leak`, of {}",
            kinds.join(", ")
        )
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Check::Compat => f.write_str("compat"),
            Check::Strict => f.write_str("strict"),
            Check::StrictWithout(kinds) => {
                f.write_str("strict")?;
                kinds.iter().try_for_each(|kind| write!(f, ",-{}", kind.name()))
            }
        }
    }
}

impl FromStr for Check {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(',').map(str::trim);
        let mode = parts.next();
        let left_out =
            parts.map(|part| part.strip_prefix('-').ok_or(())?.parse()).collect::<Result<Vec<FindingKind>, ()>>()?;
        match (mode, left_out.as_slice()) {
            (Some("compat"), []) => Ok(Check::Compat),
            (Some("strict"), []) => Ok(Check::Strict),
            (Some("strict"), kinds) => Ok(Check::StrictWithout(kinds.iter().copied().collect())),
            _ => Err(()),
        }
    }
}

named_enum! {
    /// How the emulator treats lints. A lint is an argument that an operator ignores, misreads or overruns.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Lints {
        /// Lints are not reported.
        Off => "off",
        /// Lints are reported on stderr.
        Warn => "warn",
        /// A lint is an error of the call.
        Error => "error",
    }
}

/// How long a rank waits for the others unless `ASCEND_EMU_COLLECTIVE_TIMEOUT` is set.
const COLLECTIVE_LIMIT: Duration = Duration::from_secs(60);

/// How long root information is good without a rank unless `HCCL_CONNECT_TIMEOUT` is set.
const CONNECT_LIMIT: Duration = Duration::from_secs(120);

/// Largest number of devices that `ASCEND_EMU_DEVICES` may set.
const MAX_DEVICES: u32 = 64;

/// Largest number of threads that `ASCEND_EMU_THREADS` may set: more than any host has cores.
const MAX_THREADS: u64 = 1024;

#[derive(Debug)]
pub(crate) struct Config {
    pub check: Check,
    /// How lints are treated, if chosen.
    pub lints: Option<Lints>,
    /// The machine of programs that do not choose one.
    pub machine: Machine,
    pub devices: u32,
    /// Threads of the kernel pool.
    pub threads: usize,
    /// Bytes of memory of one device, if chosen.
    pub memory: Option<u64>,
    /// Whether memory is handed out full of NaN in compat mode as well.
    pub poison: bool,
    pub faults: Plan,
    /// How long a rank waits for the others of its communicator.
    pub collective_limit: Duration,
    /// How long root information is good without a rank that joins by it.
    pub connect_limit: Duration,
    /// The file that calls are appended to, if chosen.
    pub trace: Option<File>,
}

/// A variable whose value is not one of those allowed.
fn refuse(name: &str, value: &str, allowed: &str) -> Failure {
    failure!(PARAM_INVALID, "{name}: given `{value}`, allowed: {allowed}")
}

/// Reads a variable with `parse`; `None` if it is not set.
fn read<T>(
    var: &dyn Fn(&str) -> Outcome<Option<String>>,
    name: &str,
    allowed: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Outcome<Option<T>> {
    let text = var(name)?;
    let value = text.map(|text| parse(&text).ok_or_else(|| refuse(name, &text, allowed)));
    value.transpose()
}

/// Opens a file to append to, and makes it if there is none.
fn open_to_append(path: &Path) -> io::Result<File> {
    // Opening a pipe for writing would block the first call until a process reads from it.
    if fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return Err(io::Error::other("it is a pipe, and has to be a file"));
    }
    OpenOptions::new().append(true).create(true).open(path)
}

impl Config {
    /// Reads the variables through `var`, which gives `None` for those not set.
    fn read(var: impl Fn(&str) -> Option<OsString>) -> Outcome<Self> {
        let var = |name: &str| -> Outcome<Option<String>> {
            // A variable that is set to the empty text counts as not set.
            let text = var(name).filter(|value| !value.is_empty());
            let text = text.map(OsString::into_string).transpose();
            text.map_err(|bytes| refuse(name, &bytes.to_string_lossy(), "text in UTF-8"))
        };
        let number = |name: &str, least: u64, most: u64| -> Outcome<Option<u64>> {
            let Some(text) = var(name)? else {
                return Ok(None);
            };
            match text.trim().parse() {
                Ok(value) if (least..=most).contains(&value) => Ok(Some(value)),
                _ => Err(refuse(name, &text, &format!("{least} to {most}"))),
            }
        };
        let check = read(&var, "ASCEND_EMU_CHECK", &Check::allowed(), |text| text.trim().parse().ok())?;
        let lints = read(&var, "ASCEND_EMU_LINTS", "off, warn, error", |text| text.trim().parse().ok())?;
        let releases = Cann::ALL.map(|cann| cann.to_string()).join(", ");
        let cann = read(&var, "ASCEND_EMU_CANN", &releases, |text| text.parse::<Cann>().ok())?;
        let soc = var("ASCEND_EMU_SOC")?;
        let mut machine = Machine::chosen(soc.as_deref(), cann).map_err(|error| match error {
            MachineError::Unreleased(unreleased) => {
                failure!(PARAM_INVALID, "ASCEND_EMU_SOC and ASCEND_EMU_CANN: {unreleased}")
            }
            _ => refuse("ASCEND_EMU_SOC", soc.as_deref().unwrap_or_default(), Soc::NAME_FORMS),
        })?;
        let versions = "V1, V2, V3, V4, V5";
        let newest = read(&var, "ASCEND_EMU_OPERATOR", versions, |text| {
            let mut versions = Version::ALL.into_iter();
            versions.find(|version| version.to_string() == text.trim())
        })?;
        if let Some(newest) = newest {
            machine = machine.operator(newest);
        }
        let strided = read(&var, "ASCEND_EMU_STRIDED", "copy, refuse", |text| match text.trim() {
            "copy" => Some(StridedKeys::Copied),
            "refuse" => Some(StridedKeys::Refused),
            _ => None,
        })?;
        machine = machine.strided_keys(strided.unwrap_or_default());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // The kernels read the variable themselves.
        let levels: Vec<_> = Level::all().into_iter().map(Level::name).collect();
        read(&var, Level::VARIABLE, &levels.join(", "), |text| Level::named(text.trim()))?;
        let faults = read(&var, "ASCEND_EMU_FAULT", Plan::FORM, Plan::parse)?;
        let poison = number("ASCEND_EMU_POISON", 0, 1)? == Some(1);
        let trace = match var("ASCEND_EMU_TRACE")? {
            None => None,
            Some(path) => Some(open_to_append(Path::new(&path)).map_err(|error| {
                let allowed = format!("a file to append to, or a new one in a folder ({error})");
                refuse("ASCEND_EMU_TRACE", &path, &allowed)
            })?),
        };
        Ok(Config {
            check: check.unwrap_or(Check::Compat),
            lints,
            machine,
            devices: number("ASCEND_EMU_DEVICES", 1, u64::from(MAX_DEVICES))?
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(2),
            threads: number("ASCEND_EMU_THREADS", 1, MAX_THREADS)?
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(cores),
            memory: number("ASCEND_EMU_MEMORY", 1 << 12, 1 << 44)?,
            poison,
            faults: faults.unwrap_or_default(),
            collective_limit: number("ASCEND_EMU_COLLECTIVE_TIMEOUT", 1, 7200)?
                .map_or(COLLECTIVE_LIMIT, Duration::from_secs),
            connect_limit: number("HCCL_CONNECT_TIMEOUT", 1, 7200)?.map_or(CONNECT_LIMIT, Duration::from_secs),
            trace,
        })
    }

    fn or_default(outcome: Outcome<Self>) -> (Self, Option<Failure>) {
        match outcome {
            Ok(config) => (config, None),
            Err(failure) => {
                let config = Config {
                    check: Check::Compat,
                    lints: None,
                    machine: Machine::default(),
                    devices: 2,
                    threads: 1,
                    memory: None,
                    poison: false,
                    faults: Plan::default(),
                    collective_limit: COLLECTIVE_LIMIT,
                    connect_limit: CONNECT_LIMIT,
                    trace: None,
                };
                (config, Some(failure))
            }
        }
    }
}

fn loaded() -> &'static (Config, Option<Failure>) {
    static CONFIG: OnceLock<(Config, Option<Failure>)> = OnceLock::new();
    CONFIG.get_or_init(|| {
        for variable in ascend_sys::misspelt_variables_once() {
            warn(variable);
        }
        Config::or_default(Config::read(|name| env::var_os(name)))
    })
}

/// The process's configuration: the environment as it was at the first use.
pub(crate) fn config() -> &'static Config {
    &loaded().0
}

/// Fails if the environment is wrong; `aclInit` reports the failure.
pub(crate) fn validate() -> Outcome {
    loaded().1.clone().map_or(Ok(()), Err)
}

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
}

/// The check mode in force on the calling thread: that of [`check_scope`], otherwise that of `ASCEND_EMU_CHECK`.
pub fn check() -> Check {
    CHECK.try_with(Cell::get).ok().flatten().unwrap_or_else(|| config().check)
}

/// Whether memory that the calling thread allocates is handed out full of NaN.
pub(crate) fn poisons() -> bool {
    check().is_strict() || config().poison
}

/// Chooses the check mode of the calling thread's calls until the result is dropped, whatever `ASCEND_EMU_CHECK` says.
///
/// ```
/// let strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
/// // calls on this thread are checked strictly
/// drop(strict);
/// // so are these, but for copies that the program cannot do otherwise
/// let without = "strict,-pageable_copy".parse();
/// let _rest = ascend_emu::check_scope(without.expect("the name of a kind"));
/// ```
pub fn check_scope(check: Check) -> CheckScope {
    CheckScope { before: CHECK.replace(Some(check)), thread: PhantomData }
}

/// Restores the thread's check mode when dropped; made by [`check_scope`].
#[derive(Debug)]
#[must_use = "the mode holds only until this is dropped"]
pub struct CheckScope {
    before: Option<Check>,
    /// Not `Send`: the mode is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for CheckScope {
    fn drop(&mut self) {
        let before = self.before;
        // Fails only while the thread ends, when no call can follow.
        let _ = CHECK.try_with(|check| check.set(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_set(set: &[(&str, &str)]) -> Outcome<Config> {
        Config::read(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(*value)))
    }

    #[test]
    fn nothing_set_is_the_default() {
        let config = read_set(&[]).unwrap();
        assert_eq!((config.check, config.lints), (Check::Compat, None));
        assert_eq!(config.machine, Machine::default());
        assert_eq!(config.devices, 2);
        assert!(config.threads >= 1);
        assert_eq!(config.memory, None);
    }

    #[test]
    fn values_are_taken() {
        let config = read_set(&[
            ("ASCEND_EMU_CHECK", "strict"),
            ("ASCEND_EMU_LINTS", "error"),
            ("ASCEND_EMU_SOC", "Ascend910_9391"),
            ("ASCEND_EMU_CANN", "8.5"),
            ("ASCEND_EMU_DEVICES", "8"),
            ("ASCEND_EMU_THREADS", "3"),
            ("ASCEND_EMU_MEMORY", "1048576"),
            ("ASCEND_EMU_SIMD", "portable"),
            ("ASCEND_EMU_POISON", "1"),
            ("ASCEND_EMU_OPERATOR", "V3"),
            ("ASCEND_EMU_STRIDED", "copy"),
        ])
        .unwrap();
        assert_eq!((config.check, config.lints), (Check::Strict, Some(Lints::Error)));
        let machine = Machine::new("Ascend910_9391", Cann::V8_5).unwrap();
        let machine = machine.operator(Version::V3);
        assert_eq!(config.machine, machine.strided_keys(StridedKeys::Copied));
        assert_eq!((config.devices, config.threads), (8, 3));
        assert_eq!((config.memory, config.poison), (Some(1 << 20), true));
    }

    #[test]
    fn strict_leaves_out_the_kinds_that_are_named() {
        let config = read_set(&[("ASCEND_EMU_CHECK", "strict, -leak,-pageable_copy")]).unwrap();
        let (check, leak) = (config.check, FindingKind::Leak);
        assert!(check.is_strict() && check.leaves_out(leak));
        assert!(!check.leaves_out(FindingKind::HostRace) && !Check::Strict.leaves_out(leak));
        assert_eq!(check.to_string(), "strict,-pageable_copy,-leak");
        assert_eq!(check.to_string().parse(), Ok(check));
        // What is not the name of a kind is answered with the names.
        let failure = read_set(&[("ASCEND_EMU_CHECK", "strict,-races")]).unwrap_err();
        for kind in FindingKind::ALL {
            assert!(failure.message.contains(kind.name()), "{}", failure.message);
        }
    }

    #[test]
    fn releases_are_named_as_they_name_themselves() {
        for (text, cann) in [
            ("8.1", Cann::V8_1),
            ("8.3.RC1", Cann::V8_1),
            ("8.5.0", Cann::V8_5),
            (" 9.0 ", Cann::V9_0),
            ("9.1", Cann::V9_1),
            ("9.2", Cann::V9_2),
        ] {
            let config = read_set(&[("ASCEND_EMU_CANN", text)]).unwrap();
            assert_eq!(config.machine.target().cann, cann, "{text}");
        }
    }

    #[test]
    fn a_wrong_value_names_variable_and_alternatives() {
        for (name, value) in [
            ("ASCEND_EMU_CHECK", "Strict"),
            ("ASCEND_EMU_CHECK", "strict,pageable_copy"),
            ("ASCEND_EMU_CHECK", "strict,-races"),
            ("ASCEND_EMU_CHECK", "strict,"),
            ("ASCEND_EMU_CHECK", "compat,-leak"),
            ("ASCEND_EMU_LINTS", "on"),
            ("ASCEND_EMU_STRIDED", "copied"),
            ("ASCEND_EMU_SOC", "H100"),
            ("ASCEND_EMU_CANN", "8.0"),
            ("ASCEND_EMU_CANN", "9.3"),
            ("ASCEND_EMU_CANN", "newest"),
            ("ASCEND_EMU_DEVICES", "0"),
            ("ASCEND_EMU_DEVICES", "65"),
            ("ASCEND_EMU_SOC", "Ascend9500000"),
            ("ASCEND_EMU_CANN", "9.1junk"),
            ("ASCEND_EMU_CANN", "9.1.0 and more"),
            ("ASCEND_EMU_COLLECTIVE_TIMEOUT", "0"),
            ("ASCEND_EMU_COLLECTIVE_TIMEOUT", "1.5"),
            ("ASCEND_EMU_THREADS", "many"),
            ("ASCEND_EMU_THREADS", "0"),
            ("ASCEND_EMU_THREADS", "1025"),
            ("ASCEND_EMU_THREADS", "18446744073709551616"),
            ("ASCEND_EMU_MEMORY", "-1"),
            ("ASCEND_EMU_SIMD", "mmx"),
            ("ASCEND_EMU_OPERATOR", "3"),
            ("ASCEND_EMU_OPERATOR", "V6"),
            ("ASCEND_EMU_POISON", "yes"),
            ("ASCEND_EMU_FAULT", "malloc"),
            ("ASCEND_EMU_TRACE", "/nowhere/trace.jsonl"),
            ("ASCEND_EMU_TRACE", "/"),
        ] {
            let failure = read_set(&[(name, value)]).unwrap_err();
            assert_eq!(failure.code, PARAM_INVALID);
            assert!(failure.message.starts_with(name), "{}", failure.message);
            assert!(failure.message.contains(value), "{}", failure.message);
        }
    }

    /// The names of the variables that are read.
    fn asked() -> Vec<String> {
        let asked = std::cell::RefCell::new(Vec::new());
        Config::read(|name| {
            asked.borrow_mut().push(name.to_owned());
            None
        })
        .unwrap();
        asked.into_inner()
    }

    /// A variable that is read but not listed would be reported as unknown and be missing from the documentation.
    #[test]
    fn what_is_read_is_listed() {
        for name in asked() {
            let mut listed = ascend_sys::VARIABLES.iter();
            assert!(
                listed.any(|known| known.name == name && known.reader == ascend_sys::VariableReader::Emulation),
                "{name}: add a line to ascend-sys/src/environment.rs"
            );
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_value_that_is_no_text_is_refused_and_not_passed_over() {
        use std::os::unix::ffi::OsStringExt;
        for name in asked() {
            let bytes = || OsString::from_vec(b"strict\xff".to_vec());
            let failure = Config::read(|asked| (asked == name).then(bytes)).unwrap_err();
            assert_eq!(failure.code, PARAM_INVALID);
            assert!(failure.message.starts_with(&name), "{}", failure.message);
            assert!(failure.message.contains("UTF-8"), "{}", failure.message);
        }
    }

    #[test]
    fn a_release_that_does_not_know_the_chip_is_refused_and_never_the_default() {
        let soc = ("ASCEND_EMU_SOC", "Ascend950PR_9599");
        for old in ["8.1", "8.5"] {
            let failure = read_set(&[soc, ("ASCEND_EMU_CANN", old)]).unwrap_err();
            assert_eq!(failure.code, PARAM_INVALID);
            let named = ["ASCEND_EMU_SOC", "ASCEND_EMU_CANN", "9.0, 9.1"];
            for part in named {
                assert!(failure.message.contains(part), "{}", failure.message);
            }
        }
        let alone = read_set(&[soc]).unwrap().machine;
        assert_eq!(alone, Machine::new(soc.1, Cann::NEWEST).unwrap());
        let older = read_set(&[soc, ("ASCEND_EMU_CANN", "9.0")]).unwrap().machine;
        assert_eq!(older, Machine::new(soc.1, Cann::V9_0).unwrap());
    }

    #[test]
    fn scopes_nest() {
        let outer = check_scope(Check::Strict);
        assert_eq!(check(), Check::Strict);
        let inner = check_scope(Check::Compat);
        assert_eq!(check(), Check::Compat);
        drop(inner);
        assert_eq!(check(), Check::Strict);
        drop(outer);
        assert_eq!(check(), config().check);
    }
}
