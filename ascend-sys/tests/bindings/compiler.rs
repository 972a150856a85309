//! The C and C++ compilers of this machine.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A language and what is asked of code in it.
#[derive(Clone, Copy, Debug)]
pub enum Language {
    C99,
    C11,
    Cpp11,
}

impl Language {
    fn command(self) -> Command {
        let (variable, program, arguments) = match self {
            Self::C99 => ("CC", "cc", ["-x", "c", "-std=c99"]),
            Self::C11 => ("CC", "cc", ["-x", "c", "-std=c11"]),
            Self::Cpp11 => ("CXX", "c++", ["-x", "c++", "-std=c++11"]),
        };
        let program = std::env::var_os(variable).unwrap_or_else(|| program.into());
        let mut command = Command::new(program);
        command.args(arguments);
        command
    }
}

/// The folder of our headers.
pub fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Runs a compiler over a source text written to `folder`; what it says is the error.
pub fn compile<A: AsRef<OsStr>>(
    language: Language,
    folder: &Path,
    source: &str,
    arguments: impl IntoIterator<Item = A>,
) -> Result<(), String> {
    let file = folder.join("source.txt");
    std::fs::write(&file, source).map_err(|error| error.to_string())?;
    let output = language
        .command()
        .args(arguments)
        .arg(&file)
        .output()
        .map_err(|error| format!("no {language:?} compiler: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// The headers in these folders, relative to the folder `include`.
pub fn headers(folders: &[&str]) -> Vec<String> {
    let mut headers = Vec::new();
    for folder in folders {
        for entry in std::fs::read_dir(include().join(folder)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let name = PathBuf::from(folder).join(entry.file_name());
                headers.push(name.to_str().unwrap().to_owned());
            }
        }
    }
    headers.sort();
    headers
}
