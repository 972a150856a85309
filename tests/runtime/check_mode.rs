//! What a failing test says of the emulation's mode of checking.

use std::env;
use std::process::Command;

use crate::harness;

#[test]
fn the_first_failure_tells_the_mode() {
    if harness::not_on_npu("hardware checks nothing") {
        return;
    }
    for (mode, says) in [
        ("", "checked in the mode compat (ASCEND_EMU_CHECK): races and other misuse pass"),
        ("strict", "checked in the mode strict (ASCEND_EMU_CHECK): races and other misuse are errors"),
    ] {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "check_mode::child_fails", "--nocapture"])
            .env("ASCEND_TEST_CHILD", "1")
            .env("ASCEND_EMU_CHECK", mode)
            .output()
            .unwrap();
        let said = String::from_utf8(child.stderr).unwrap();
        assert!(!child.status.success() && said.contains("as it should"), "{said}");
        // Two failures, reported once.
        assert_eq!(said.matches(says).count(), 1, "{mode}: {said}");
    }
}

/// Body of the child processes of [`the_first_failure_tells_the_mode`].
#[test]
fn child_fails() {
    if env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    let _device = harness::device();
    let caught = std::panic::catch_unwind(|| panic!("a first time"));
    assert!(caught.is_ok(), "as it should");
}
