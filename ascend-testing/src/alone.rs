//! Tests that have a process for themselves.

/// Runs the body of the test of this name in a process of its own.
#[track_caller]
pub fn alone(name: &str, body: impl FnOnce()) {
    const VARIABLE: &str = "ASCEND_TEST_CHILD";
    if std::env::var_os(VARIABLE).is_some() {
        return body();
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    let (out, err) = (&child.stdout, &child.stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(child.status.success(), "{}\n{out}\n{err}", child.status);
    assert!(out.contains("1 passed"), "{name} is no test: {out}");
}
