//! Repeats a call with other numbers of emulation threads. A process chooses the number once, so each runs in a
//! process of its own.

use std::env;
use std::path::Path;
use std::process::Command;

use ascend_attention::Platform;
use ascend_attention::case::{AttentionCase, Case, CaseTensor};

/// The numbers of threads.
pub(super) const COUNTS: [usize; 4] = [1, 2, 3, 8];

/// The variable that the emulation reads.
const VARIABLE: &str = "ASCEND_EMU_THREADS";

/// The outputs of a case with this number of threads, computed by deterministic operators or others.
///
/// # Errors
/// Why the outputs are not known: an NPU has no such choice, or the process failed.
pub(super) fn outputs(
    case: &AttentionCase,
    threads: usize,
    platform: Platform,
    deterministic: bool,
) -> Result<Vec<(&'static str, CaseTensor)>, String> {
    if platform != Platform::Emulated {
        return Err("an NPU does not let a program choose its threads".to_owned());
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let file = folder.path().join("case.safetensors");
    let out = folder.path().join("computed");
    case.write(&file).map_err(|error| error.to_string())?;
    run(&file, &out, threads, deterministic)?;
    let computed = out.join("case.safetensors");
    let computed = Case::read(computed).map_err(|error| error.to_string())?;
    Ok(computed.expected)
}

/// Runs `ascend-attn run` on a case in a process with this number of threads.
fn run(file: &Path, out: &Path, threads: usize, deterministic: bool) -> Result<(), String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .args(["run", "--platform", "emulated", "--out"])
        .args([out, file])
        .args(deterministic.then_some("--deterministic"))
        .env(VARIABLE, threads.to_string())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let printed = [output.stderr, output.stdout].concat();
    Err(format!(
        "a process with {VARIABLE}={threads}: {}; it said: {}",
        output.status,
        String::from_utf8_lossy(&printed).trim()
    ))
}
