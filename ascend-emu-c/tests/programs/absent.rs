//! Operators that a client links and the emulation lacks: a library beside CANN's answers for them.

use crate::{absent_operators, command, compile_with, emu_libs, library, run};

#[test]
fn an_operator_that_is_absent_says_so_and_is_still_absent_from_the_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = folder.path().join("lib64");
    emu_libs::place(&library(), &libraries).unwrap();
    let flags = ["-std=c99", "-DCLIENT", "-shared", "-fPIC", "-Wl,-z,lazy"];
    let built = compile_with("absent.c", &flags, &["opapi"], &libraries);
    let client = libraries.join("libclient.so");
    std::fs::rename(built, &client).unwrap();
    let flags = ["-std=c99", "-Wl,--allow-shlib-undefined"];
    let names = ["client", "ascendcl", "dl"];
    let program = compile_with("absent.c", &flags, &names, &libraries);

    // Alone, the process ends at the call.
    let alone = command(&program, &libraries).output().unwrap();
    assert!(!alone.status.success());

    let client = client.to_str().unwrap();
    let said = absent_operators::write(folder.path(), &[client]).unwrap();
    let missing = "not emulated:  aclnnNoSuchOperatorGetWorkspaceSize\n";
    assert!(said.starts_with(missing), "{said}");
    let preloaded =
        command(&program, &libraries).env("LD_PRELOAD", libraries.join(absent_operators::NAME)).output().unwrap();
    let text = String::from_utf8(preloaded.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "library 1 function 0", "{text}");
    assert_eq!(lines[1], "361001 not emulated: aclnnNoSuchOperator");
    assert_eq!(lines[2], "done");

    // Nothing is lacking in a program that calls what there is.
    let right = compile_with("two_phase.c", &["-std=c99"], &["ascendcl", "nnopbase", "opapi"], &libraries);
    run(&right, &libraries);
    let said = absent_operators::write(folder.path(), &[right.to_str().unwrap()]).unwrap();
    assert!(said.contains("every operator"), "{said}");
    assert!(!libraries.join(absent_operators::NAME).exists());
}
