//! Development tasks of this workspace; run without arguments for the list.

mod absent_operators;
#[cfg(feature = "bindgen")]
mod bindgen_task;
mod costs_task;
mod dynamic_symbols;
mod emu_libs;
mod environment_task;
mod features_task;
mod figures_task;
mod finding_tables;
#[cfg(feature = "bindgen")]
#[path = "../../ascend-sys/build/generate.rs"]
mod generate;
mod marked;
mod module_cycles;
mod module_tree;
mod operator_headers;
mod operator_tables;
mod operators_task;
mod rule_tables;
mod rules_task;
mod toolkit_folder;

use ascend_spec::Cann;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo run -p xtask -- TASK

tasks:
  bindgen [--check]          regenerate ascend-sys/src/{bindings,names}.rs from include/; with --check write nothing and
                             fail if they differ (needs libclang, and this program's feature bindgen)
  rules [--check]            write the tables of the contract's rules and of findings to docs/src/rules.md, and the
                             tables of arguments into the pages of single operators; with --check compare only
  features [--check]         write the table of features by product and release to docs/src/features.md; with --check
                             compare only
  environment [--check]      write the tables of environment variables to docs/src/environment.md; with --check compare
                             only
  operators [--check]        write what in PyTorch calls the small operators to docs/src/python.md; with --check compare
                             only
  costs [--check]            write what divisions of attention cost on paper to docs/src/ranks-costs.md; with --check
                             compare only
  figures [--check]          draw the book's figures; with --check compare only
  module-cycles [--nested] [CRATE...]
                             fail if modules of a crate depend on each other in a circle: the top-level modules of
                             these crates, or of all; with --nested the modules inside of modules as well
  emu-libs DIR [--release | --library FILE] [--cann RELEASE] [--toolkit]
                             build the emulator as a shared library, or take the one in FILE, and make DIR a toolkit:
                             CANN's names of libraries in lib64, headers in include; with --cann (8.1, 8.5, 9.0, 9.1,
                             9.2) the libraries lack the entry points that the release lacks; with --toolkit the
                             packages' folders, version files and set_env.sh as well, for programs that look for an
                             installed CANN
  absent DIR FILE...         make a library in such a DIR with the operators that these programs and libraries link and
                             the emulation lacks; each says so when it is called (needs a C compiler)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["module-cycles", "--nested", crates @ ..] => module_cycles::check(&root(), crates, true),
        ["module-cycles", crates @ ..] => module_cycles::check(&root(), crates, false),
        ["absent", folder, clients @ ..] if !clients.is_empty() => absent_operators::write(Path::new(folder), clients),
        ["emu-libs", rest @ ..] => emulator(rest),
        [task] => generated(task, false),
        [task, "--check"] => generated(task, true),
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

/// Writes what a task generates, or compares it with what is in the tree.
fn generated(task: &str, compare: bool) -> Result<String, String> {
    let renew = match task {
        #[cfg(feature = "bindgen")]
        "bindgen" => bindgen_task::renew,
        "rules" => rules_task::renew,
        "features" => features_task::renew,
        "environment" => environment_task::renew,
        "operators" => operators_task::renew,
        "costs" => costs_task::renew,
        "figures" => figures_task::renew,
        _ => return Err(USAGE.to_owned()),
    };
    renew(&root(), compare)
}

/// The task `emu-libs` with its arguments, in any order.
fn emulator(arguments: &[&str]) -> Result<String, String> {
    let (mut folder, mut release, mut cann, mut toolkit) = (None, false, None, false);
    let mut library = None;
    let mut rest = arguments.iter();
    while let Some(&argument) = rest.next() {
        match argument {
            "--release" => release = true,
            "--toolkit" => toolkit = true,
            "--library" => library = Some(PathBuf::from(rest.next().ok_or(USAGE)?)),
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
    let folder = Path::new(folder);
    let library = match library {
        Some(file) => file,
        None => emu_libs::build(&root(), release)?,
    };
    let laid_out = emu_libs::lay_out(&root(), folder, &library, cann)?;
    operator_headers::write(&root(), &folder.join("include"))?;
    if !toolkit {
        return Ok(laid_out);
    }
    let furnished = toolkit_folder::furnish(folder, cann).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(format!("{laid_out}\n{furnished}"))
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
