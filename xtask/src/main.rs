//! Development tasks of this workspace; run without arguments for the list.

mod bindgen_task;
mod dynamic_symbols;
mod emu_libs;
mod features_task;
mod figures_task;
#[path = "../../ascend-sys/build/generate.rs"]
mod generate;
mod rules_task;

use ascend_spec::Cann;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo run -p xtask -- TASK

tasks:
  bindgen [--check]          regenerate ascend-sys/src/{bindings,table}.rs from include/ (needs libclang);
                             with --check write nothing and fail if they differ
  rules [--check]            write the table of the contract's rules to docs/src/rules.md; with --check compare only
  features [--check]         write the table of features by product and release into README.md; with --check compare only
  figures [--check]          draw the book's figures; with --check compare only
  emu-libs DIR [--release] [--cann RELEASE]
                             build the emulator as a shared library and make DIR a toolkit: CANN's names of
                             libraries in lib64, headers in include; with --cann (8.1, 8.5, 9.0, 9.1) the libraries
                             lack the entry points that the release lacks
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["bindgen"] => bindgen_task::write(&root()),
        ["bindgen", "--check"] => bindgen_task::check(&root()),
        ["rules"] => rules_task::write(&root()),
        ["rules", "--check"] => rules_task::check(&root()),
        ["features"] => features_task::write(&root()),
        ["features", "--check"] => features_task::check(&root()),
        ["figures"] => figures_task::write(&root()),
        ["figures", "--check"] => figures_task::check(&root()),
        ["emu-libs", rest @ ..] => emulator(rest),
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The task `emu-libs` with its arguments, in any order.
fn emulator(arguments: &[&str]) -> Result<String, String> {
    let (mut folder, mut release, mut cann) = (None, false, None);
    let mut rest = arguments.iter();
    while let Some(&argument) = rest.next() {
        match argument {
            "--release" => release = true,
            "--cann" => {
                let text = rest.next().copied().unwrap_or_default();
                let chosen = text.parse::<Cann>();
                cann = Some(chosen.map_err(|error| format!("--cann: {error}"))?);
            }
            _ if folder.is_none() && !argument.starts_with('-') => folder = Some(argument),
            _ => return Err(USAGE.to_owned()),
        }
    }
    let folder = folder.ok_or_else(|| USAGE.to_owned())?;
    emu_libs::lay_out(&root(), Path::new(folder), release, cann)
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
