//! `emu-libs`: lays the emulator out as an installed toolkit of CANN: `lib64` and `include`.

use super::dynamic_symbols;
use ascend_spec::{Cann, is_exported};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The file that cargo builds.
const BUILT: &str = "libascend_emu_c.so";
/// The one real file among the libraries.
const FILE: &str = "libascend_emu.so";
/// The names that programs link and load, in older and newer releases. All link to one file, so that a process has
/// one emulator. `libcust_opapi.so` is not among them: it exists only where users have installed operators of their
/// own.
const NAMES: [&str; 14] = [
    "libacl_op_compiler.so",
    "libacl_rt.so",
    "libacl_tdt_channel.so",
    "libascendcl.so",
    "libatb.so",
    "libc_sec.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libhcomm.so",
    "libnnopbase.so",
    "libopapi.so",
    "libopapi_math.so",
    "libopapi_transformer.so",
];

/// Makes `folder` a toolkit with the shared library, for `ASCEND_HOME_PATH` to name. With `cann`, the toolkit exports
/// only the entry points of that release.
pub(crate) fn lay_out(root: &Path, folder: &Path, library: &Path, cann: Option<Cann>) -> Result<String, String> {
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    place(library, &folder.join("lib64")).map_err(failed)?;
    copy_folder(&root.join("include"), &folder.join("include")).map_err(failed)?;
    let folder = fs::canonicalize(folder).map_err(failed)?;
    let (mut chosen, mut missing) = (String::new(), String::new());
    if let Some(cann) = cann {
        let names = keep(&folder.join("lib64"), cann)?;
        chosen = format!("ASCEND_EMU_CANN={} ", cann.name());
        if !names.is_empty() {
            missing = format!("missing:  as in CANN {cann}, {}\n", names.join(", "));
        }
    }
    let folder = folder.display();
    Ok(format!(
        "{folder} is a toolkit: headers in include; in lib64 {FILE} and, leading to it, {}\n{missing}\
         compile:  cc -I{folder}/include program.c -L{folder}/lib64 -lopapi -lnnopbase -lascendcl\n\
         run:      {chosen}LD_LIBRARY_PATH={folder}/lib64 ./a.out\n\
         Rust:     {chosen}ASCEND_HOME_PATH={folder} ASCEND_PLATFORM=npu",
        NAMES.join(", "),
    ))
}

/// Hides the entry points that a release does not have, in the library of a folder that [`place`] made. Returns their
/// names.
pub(crate) fn keep(folder: &Path, cann: Cann) -> Result<Vec<String>, String> {
    let file = folder.join(FILE);
    let failed = |error: io::Error| format!("{}: {error}", file.display());
    let mut elf = fs::read(&file).map_err(failed)?;
    let newer = |name: &str| !is_exported(name, cann);
    let hidden = dynamic_symbols::hide(&mut elf, newer).map_err(|error| format!("{}: {error}", file.display()))?;
    fs::write(&file, elf).map_err(failed)?;
    Ok(hidden)
}

/// Builds the shared library and returns its file.
pub(crate) fn build(root: &Path, release: bool) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(root)
        .args(["build", "-p", "ascend-emu-c", "--message-format=json-render-diagnostics"])
        .args(release.then_some("--release"))
        .stderr(Stdio::inherit());
    let output = command.output().map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo build -p ascend-emu-c: {}", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    built_file(&messages).ok_or_else(|| format!("cargo build -p ascend-emu-c made no {BUILT}"))
}

/// The path of the library in cargo's messages, where it is a JSON string.
fn built_file(messages: &str) -> Option<PathBuf> {
    let path = messages.split('"').find(|text| {
        let path = Path::new(text);
        path.is_absolute() && path.file_name().is_some_and(|name| name == BUILT)
    });
    path.map(PathBuf::from)
}

/// Copies the library and links the names to the copy, relative to the folder so that it can be moved.
pub(crate) fn place(library: &Path, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for name in NAMES.into_iter().chain([FILE]) {
        // Removes the old file instead of overwriting it: programs that have it open keep it.
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::copy(library, folder.join(FILE))?;
    for name in NAMES {
        link(folder, name)?;
    }
    Ok(())
}

/// Copies a folder, whose entries are folders of files, over another.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

#[cfg(unix)]
fn link(folder: &Path, name: &str) -> io::Result<()> {
    std::os::unix::fs::symlink(FILE, folder.join(name))
}

#[cfg(not(unix))]
fn link(_folder: &Path, _name: &str) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "the libraries exist on Linux only"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_one_file_also_when_laid_out_again_and_moved() {
        let home = tempfile::tempdir().unwrap();
        let (library, folder) = (home.path().join("built.so"), home.path().join("a/b"));
        for content in ["old", "new"] {
            fs::write(&library, content).unwrap();
            place(&library, &folder).unwrap();
        }
        let moved = home.path().join("c");
        fs::rename(&folder, &moved).unwrap();
        for name in NAMES {
            assert_eq!(fs::canonicalize(moved.join(name)).unwrap(), moved.canonicalize().unwrap().join(FILE));
            assert_eq!(fs::read_to_string(moved.join(name)).unwrap(), "new");
        }
    }

    #[test]
    fn the_library_is_found_in_cargo_s_messages() {
        let messages = r#"{"reason":"compiler-artifact","filenames":["/t/debug/libother.rlib"]}
{"reason":"compiler-artifact","filenames":["/t/debug/libascend_emu_c.so"],"executable":null}"#;
        assert_eq!(built_file(messages), Some("/t/debug/libascend_emu_c.so".into()));
        assert_eq!(built_file(""), None);
    }
}
