//! Programs that misuse operators: lints of their calls reach stderr, and a device that failed in strict mode answers
//! every later call with that failure.

use crate::{command, compile, lay_out, succeed};
use std::path::Path;
use std::process::Output;

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a program with a variable of the emulator's.
fn with(program: &Path, libraries: &Path, name: &str, value: &str) -> Output {
    command(program, libraries).env(name, value).output().unwrap()
}

#[test]
fn a_lint_is_told_with_what_mends_the_call() {
    let libraries = lay_out();
    let flags = ["-std=c99", "-DPRE_TOKENS=2"];
    let program = compile("two_phase.c", &flags, libraries.path());
    let told = stderr(&succeed(&mut command(&program, libraries.path())));
    assert_eq!(told.lines().count(), 2, "{told}");
    for part in [
        "version.deprecated: calls go to V4 or V5",
        "ascend-emu: lint: aclnnFusedInferAttentionScore: tokens.without_mask",
        "fix: set sparseMode to 4, give attenMask as BOOL [2048, 2048]",
        "query FLOAT16 [1, 2, 3, 16]",
    ] {
        assert!(told.contains(part), "{told}");
    }
    let lints = |value| with(&program, libraries.path(), "ASCEND_EMU_LINTS", value);
    let off = lints("off");
    assert!(off.status.success() && off.stderr.is_empty());
    let error = lints("error");
    assert_eq!(error.status.code(), Some(1));
    assert!(stderr(&error).contains("tokens.without_mask"));
    let unknown = stderr(&lints("on"));
    assert!(unknown.contains("off, warn, error"), "{unknown}");
    // It stays within the tensors: no error of the strict mode.
    let strict = with(&program, libraries.path(), "ASCEND_EMU_CHECK", "strict");
    assert!(strict.status.success(), "{}", stderr(&strict));
    assert_eq!(stderr(&strict), told);
    // Its version is no fault of a call.
    let right = compile("two_phase.c", &["-std=c99"], libraries.path());
    let deprecated = with(&right, libraries.path(), "ASCEND_EMU_LINTS", "error");
    let told = stderr(&deprecated);
    assert!(deprecated.status.success(), "{told}");
    assert_eq!(told.matches("version.deprecated").count(), 1, "{told}");
}

#[test]
fn a_lint_by_which_the_device_may_leave_the_tensors_is_an_error_in_strict() {
    let libraries = lay_out();
    let flags = ["-std=c99", "-DQUERIES=1", "-DLSE_ROWS=2"];
    let program = compile("two_phase.c", &flags, libraries.path());
    // Later releases refuse the call.
    let run = |check| {
        let mut command = command(&program, libraries.path());
        command.env("ASCEND_EMU_CANN", "8.1");
        command.env("ASCEND_EMU_CHECK", check).output().unwrap()
    };
    let told = run("compat");
    assert!(told.status.success(), "{}", stderr(&told));
    let strict = run("strict");
    assert_eq!(strict.status.code(), Some(1));
    for text in [stderr(&told), stderr(&strict)] {
        for part in
            ["softmax_lse.unchecked", "the device may leave the tensors: the operator writes a FLOAT for each row"]
        {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn a_device_that_failed_strictly_answers_waits_and_copies_with_that_until_it_is_reset() {
    let libraries = lay_out();
    let program = compile("misuse.c", &["-std=c99"], libraries.path());
    let strict = succeed(command(&program, libraries.path()).env("ASCEND_EMU_CHECK", "strict"));
    let printed = String::from_utf8(strict.stdout.clone()).unwrap();
    let lines: Vec<&str> = printed.lines().collect();
    for (line, what) in lines.iter().zip(["stream", "event", "device", "copy", "async", "elsewhere"]) {
        assert!(line.starts_with(&format!("{what} 507015 ")), "{printed}");
        let finding = "device 0 has failed";
        assert!(line.contains(finding), "{printed}");
        assert!(line.contains("memory freed while in use"), "{printed}");
    }
    // Nothing was copied, so that nobody takes it for a result.
    assert_eq!(lines[6..], ["host 3", "again 0 ", "host 7", "done"]);
    let told = stderr(&strict);
    assert!(told.contains("host memory that is not pinned"), "{told}");
    // A client that nobody can change is checked for the rest, and told of no kind that is left out.
    let mut without = command(&program, libraries.path());
    without.env("ASCEND_EMU_CHECK", "strict,-free_in_use,-pageable_copy");
    let without = succeed(&mut without);
    let told = stderr(&without);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.contains("memory freed while in use (1)"), "{told}");
    let without = String::from_utf8(without.stdout).unwrap();
    assert_eq!(without.matches(" 0 \n").count(), 7, "{without}");
    // Otherwise it goes on as hardware does.
    let printed = succeed(&mut command(&program, libraries.path())).stdout;
    let printed = String::from_utf8(printed).unwrap();
    assert_eq!(printed.matches(" 0 \n").count(), 7, "{printed}");
}
