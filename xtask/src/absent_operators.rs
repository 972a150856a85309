//! `absent`: a library with the operators that programs link and the emulation lacks, each of which refuses the call by
//! name.
//!
//! A program that binds lazily would end at the first such call, with nothing but the loader's word. The functions
//! stand in a library of their own, which a program is given by `LD_PRELOAD` or at its link: whoever looks operators up
//! in CANN's libraries, as PyTorch's extension does to choose among them, still finds that they are absent.

use crate::dynamic_symbols;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

/// The library, in `lib64` of a toolkit folder.
pub(crate) const NAME: &str = "libaclnn_absent.so";

/// Names of functions in a library or program: those it defines, or those it lacks.
fn names(file: &Path, defined: bool) -> Result<BTreeSet<String>, String> {
    let elf = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let names = dynamic_symbols::names(&elf, defined);
    let names = names.map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(names.into_iter().collect())
}

/// The source of the functions. They are declared without parameters: callers clear their arguments away.
fn source(missing: &BTreeSet<String>) -> String {
    let mut text = "int ascend_emu_not_emulated(const char *name);\n".to_owned();
    for name in missing {
        let operator = name.strip_suffix("GetWorkspaceSize").unwrap_or(name);
        let _ = writeln!(text, "int {name}(void) {{ return ascend_emu_not_emulated(\"{operator}\"); }}");
    }
    text
}

/// Makes the library of a toolkit folder for some programs and libraries.
pub(crate) fn write(folder: &Path, clients: &[&str]) -> Result<String, String> {
    let libraries = folder.join("lib64");
    let emulated = names(&libraries.join("libascend_emu.so"), true)?;
    let mut missing = BTreeSet::new();
    for client in clients {
        let lacked = names(Path::new(client), false)?;
        let lacked = lacked.into_iter();
        missing.extend(lacked.filter(|name| name.starts_with("aclnn") && !emulated.contains(name)));
    }
    let library = libraries.join(NAME);
    let failed = |error: io::Error| format!("{}: {error}", library.display());
    match fs::remove_file(&library) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    if missing.is_empty() {
        return Ok("every operator that they link is emulated".to_owned());
    }
    let code = libraries.join("aclnn_absent.c");
    fs::write(&code, source(&missing)).map_err(failed)?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&code);
    let status = command.status();
    let _ = fs::remove_file(&code);
    let status = status.map_err(|error| format!("cc: {error}"))?;
    if !status.success() {
        return Err(format!("{command:?}: {status}"));
    }
    let missing: Vec<_> = missing.into_iter().collect();
    Ok(format!(
        "not emulated:  {}\nto go on until one is called:  LD_PRELOAD={}",
        missing.join(", "),
        library.display()
    ))
}
