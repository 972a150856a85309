//! What the library exports, as releases have it.

use crate::{command, compile, emu_libs, lay_out, library, run, succeed};
use ascend_spec::ops::fused_infer_attention_score::Version;
use ascend_spec::{Cann, is_exported};
use std::process::Command;

macro_rules! names {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        &[ $( stringify!($name) ),* ]
    };
}

const NAMES: &[&str] = ascend_sys::for_each_function! { names };

/// Not a test of its own: which entry points the table of a loaded toolkit has.
#[test]
fn child_loads_a_toolkit() {
    if std::env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    // SAFETY: the variable names the emulator's library, which has the functions that it is asked for.
    let api = unsafe { ascend_sys::Api::load() }.unwrap();
    macro_rules! look_up {
        ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
            $( if api.$name().is_ok() { println!("found {}", stringify!($name)); } )*
        };
    }
    ascend_sys::for_each_function! { look_up }
}

#[test]
fn a_toolkit_of_a_release_lacks_the_entry_points_that_the_release_lacks() {
    for cann in Cann::ALL {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("lib64");
        emu_libs::place(&library(), &libraries).unwrap();
        let hidden = emu_libs::keep(&libraries, cann).unwrap();
        let newest = Version::newest_of(cann);
        let (newer, expected): (Vec<&str>, Vec<&str>) = NAMES.iter().partition(|name| !is_exported(name, cann));
        assert_eq!(hidden.len(), newer.len(), "{cann}: {hidden:?}");
        assert!(newer.iter().all(|name| hidden.iter().any(|hidden| hidden == name)));
        // GatherPaKvCache, both indexers, both operators that attend to chosen keys, four of native sparse attention,
        // the recurrent gated delta rule; CausalConv1d of another package.
        let since_8_5 = if cann < Cann::V8_5 { 11 * 2 } else { 0 };
        // BlockSparseAttention.
        let since_9_0 = if cann < Cann::V9_0 { 2 } else { 0 };
        // ChunkGatedDeltaRule, and both forms of FusedCausalConv1d.
        let since_9_1 = if cann < Cann::V9_1 { 3 * 2 } else { 0 };
        // The second version of SparseFlashAttention.
        let since_9_2 = if cann < Cann::V9_2 { 2 } else { 0 };
        // Of training attention: the third version, the fifth for packed sequences, the fourth, the measurement, the
        // quantised form.
        let training = match cann {
            Cann::V8_1 => 2 + 3 + 2 + 2,
            Cann::V8_5 => 2 + 1 + 2,
            Cann::V9_0 => 1,
            _ => 2,
        };
        assert_eq!(
            newer.len(),
            3 * (5 - Version::ALL.iter().filter(|of| **of <= newest).count())
                + since_8_5
                + since_9_0
                + since_9_1
                + since_9_2
                + training
        );

        let this = std::env::current_exe().unwrap();
        let mut child = command(&this, &libraries);
        child
            .args(["--exact", "exports::child_loads_a_toolkit", "--nocapture"])
            .env("ASCEND_TEST_CHILD", "1")
            .env("ASCEND_HOME_PATH", folder.path())
            .env("ASCEND_EMU_CANN", cann.to_string());
        let text = String::from_utf8(succeed(&mut child).stdout).unwrap();
        let found: Vec<&str> =
            text.lines().filter_map(|line| line.rsplit_once("found ").map(|(_, name)| name)).collect();
        assert_eq!(found, expected, "{cann}");

        // What is left links and runs as before.
        let program = compile("two_phase.c", &["-std=c99"], &libraries);
        run(&program, &libraries);
    }
}

#[test]
fn operators_that_clients_do_not_find_are_named() {
    let libraries = lay_out();
    let program = compile("missing.c", &["-std=c99"], libraries.path());
    let printed = run(&program, libraries.path());
    let refusals: Vec<bool> = (printed.lines.iter())
        .filter(|line| line.starts_with("200006 aclSetCompileopt: "))
        .map(|line| line.contains("the operator aclnn"))
        .collect();
    // The name belongs to the refusal that follows, and is none of which there is an older version.
    assert_eq!(refusals, [false, true, false, !cfg!(feature = "glue")]);
    assert!(printed.lines.iter().any(|line| line.contains("the operator aclnnErf is not emulated")));
    // What kernels of the client's own would need is refused, and nothing is written.
    let refused = |line: &String| line.starts_with("207000 5 6 rtGetC2cCtrlAddr") && line.contains("not emulated");
    assert!(printed.lines.iter().any(refused), "{:?}", printed.lines);
    // An operator that is there to be refused, under its own name.
    let named = "the operator aclnnGroupedMatmulV4 is not emulated";
    let refused = |line: &String| line.starts_with("361001 ") && line.contains(named);
    assert!(printed.lines.iter().any(refused), "{:?}", printed.lines);
}

/// The functions of the small operators around attention: two of each, and what one has beside them.
#[cfg(feature = "glue")]
fn glue_names() -> impl Iterator<Item = &'static str> {
    let operators = ascend_emu::glue::OPERATORS.iter().copied();
    let second = operators.clone().map(|name| &*format!("{name}GetWorkspaceSize").leak());
    operators.chain(second).chain(["aclnnNpuFormatCastCalculateSizeAndFormat"])
}

#[cfg(not(feature = "glue"))]
fn glue_names() -> impl Iterator<Item = &'static str> {
    std::iter::empty()
}

#[test]
fn the_library_exports_the_whole_table_and_what_programs_take_beside_it() {
    const UNSUPPORTED: &str = include_str!("../../src/unsupported.rs");
    const SECURE: [&str; 6] = ["memcpy_s", "memmove_s", "memset_s", "strcat_s", "strcpy_s", "strncpy_s"];
    let path = std::ffi::CString::new(library().to_str().unwrap()).unwrap();
    // SAFETY: loading the library runs no code of its own.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null());
    for name in NAMES {
        let symbol = std::ffi::CString::new(*name).unwrap();
        // SAFETY: a live handle and a NUL-terminated text; the result is not called.
        let found = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        assert!(!found.is_null(), "{name} is missing");
        // SAFETY: as above.
        let here = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
        assert!(here.is_null(), "{name} is defined in this program");
    }
    let listed = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output();
    // Where there is no nm, the names above are what can be shown.
    if let Ok(listed) = listed {
        let text = String::from_utf8(listed.stdout).unwrap();
        let mut exported: Vec<&str> = text.lines().filter_map(|l| l.split(' ').next_back()).collect();
        // Members of `op::fp16_t`; the program that uses them says whether any is missing. What PyTorch's extension
        // takes of ATB.
        let (half, atb) = ("2op7tagFp16", "_ZN3atb");
        exported.retain(|name| !name.contains(half) && !name.starts_with(atb));
        exported.sort_unstable();
        // Functions that fail by name; clients that link them say whether any is missing.
        exported.retain(|name| !UNSUPPORTED.split([' ', ';', '(', '\n']).any(|word| word == *name));
        let mut names = [NAMES, &SECURE].concat();
        names.extend(glue_names());
        names.sort_unstable();
        assert_eq!(exported, names);
    }
}
