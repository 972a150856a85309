//! Programs in C and C++, written for CANN, link against the emulator's library and print the right numbers.
//!
//! A statically linked test program belongs to a target without shared libraries to link: nothing to show there.
#![cfg(not(target_feature = "crt-static"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../../../xtask/src/dynamic_symbols.rs"]
mod dynamic_symbols;
#[allow(dead_code, reason = "its task is a program; here is what it lays out")]
#[path = "../../../xtask/src/emu_libs.rs"]
mod emu_libs;

#[path = "../../../xtask/src/absent_operators.rs"]
mod absent_operators;
#[path = "../../../xtask/src/operator_headers.rs"]
mod operator_headers;

mod absent;
mod computed;
mod exports;
mod headers;
mod misuse;
mod recording;
mod trace;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const TARGET: &str = env!("EMULATION_TARGET");

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The shared library, which cargo has built for this test beside it.
fn library() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    this.with_file_name("libascend_emu_c.so")
}

/// Runs a command to success.
fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// A folder that looks like a toolkit's `lib64`.
fn lay_out() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    emu_libs::place(&library(), folder.path()).unwrap();
    folder
}

/// Compiles a program of `tests/c` against the headers and the libraries.
fn compile(source: &str, flags: &[&str], libraries: &Path) -> PathBuf {
    compile_with(source, flags, &["ascendcl", "nnopbase", "opapi"], libraries)
}

/// [`compile`] against these libraries.
fn compile_with(source: &str, flags: &[&str], names: &[&str], libraries: &Path) -> PathBuf {
    let program = libraries.join(source.replace('.', "_"));
    let mut build = cc::Build::new();
    build
        .cargo_metadata(false)
        .cpp(source.ends_with(".cpp"))
        .target(TARGET)
        .host(env!("EMULATION_HOST"))
        .opt_level(1)
        .debug(false)
        .warnings(false);
    let mut command = build.get_compiler().to_command();
    command
        .args(flags)
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(repository().join("include"))
        .arg(repository().join("tests/c").join(source))
        .arg("-L")
        .arg(libraries)
        .args(names.iter().map(|name| format!("-l{name}")))
        .arg("-o")
        .arg(&program);
    succeed(&mut command);
    program
}

/// What a program prints: lines of words, and numbers by name and index.
struct Printed {
    lines: Vec<String>,
    numbers: BTreeMap<(String, usize), f64>,
}

/// The command that runs a program, in an environment without the emulator's variables.
fn command(program: &Path, libraries: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", libraries);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ASCEND_EMU_") {
            command.env_remove(name);
        }
    }
    command.env_remove("ASCEND_RECORD");
    command
}

fn run(program: &Path, libraries: &Path) -> Printed {
    let output = succeed(&mut command(program, libraries));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut printed = Printed { lines: text.lines().map(str::to_owned).collect(), numbers: BTreeMap::new() };
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [name @ ("out" | "lse"), index, value] = words[..] {
            let key = (name.to_owned(), index.parse().unwrap());
            printed.numbers.insert(key, value.parse().unwrap());
        }
    }
    assert_eq!(printed.lines.last().map(String::as_str), Some("done"));
    printed
}

impl Printed {
    /// Checks every number of a name.
    fn check(&self, name: &str, expected: &[f64], tolerance: f64) {
        for (index, want) in expected.iter().enumerate() {
            let got = self.numbers.get(&(name.to_owned(), index)).copied();
            let got = got.unwrap_or_else(|| panic!("{name} {index} is not printed"));
            assert!((got - want).abs() <= tolerance, "{name} {index}: {got} is not {want}");
        }
        let count = self.numbers.keys().filter(|(of, _)| of == name).count();
        assert_eq!(count, expected.len());
    }
}
