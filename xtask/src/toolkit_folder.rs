//! Parts of an installed toolkit that clients expect besides libraries and headers: the folders of its packages, the
//! files that state its version, and `set_env.sh`.

use ascend_spec::Cann;
use std::env::consts::ARCH;
use std::fs;
use std::io;
use std::path::Path;

/// Packages of a toolkit that clients look for as folders, each with a `version.info`.
const PACKAGES: [&str; 3] = ["compiler", "opp", "runtime"];

/// The script, which finds its own folder, so that the toolkit can be moved.
const SET_ENV: &str = r#"# Makes this toolkit the one that programs of this shell use:  source set_env.sh
# It is an emulation: attention operators are computed by the processor, and there is no NPU.
_toolkit=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)
export ASCEND_TOOLKIT_HOME=$_toolkit
export ASCEND_HOME_PATH=$_toolkit
export ASCEND_OPP_PATH=$_toolkit/opp
export LD_LIBRARY_PATH=$_toolkit/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# At this level PyTorch's extension says which operators it does not find, so that errors can name them.
export ASCEND_GLOBAL_LOG_LEVEL=${ASCEND_GLOBAL_LOG_LEVEL:-2}
unset _toolkit
"#;

/// Makes a folder with libraries a toolkit of a release. `chosen` is the release whose entry points the libraries are
/// limited to; without one, a program may choose any release. Returns how PyTorch is started on it.
pub(crate) fn furnish(folder: &Path, chosen: Option<Cann>) -> io::Result<String> {
    let version = format!("{}.0", chosen.unwrap_or(Cann::NEWEST).name());
    for package in PACKAGES {
        let package = folder.join(package);
        fs::create_dir_all(&package)?;
        fs::write(package.join("version.info"), format!("Version={version}\n"))?;
    }
    let platform = folder.join(format!("{ARCH}-linux"));
    fs::create_dir_all(&platform)?;
    fs::write(
        platform.join("ascend_toolkit_install.info"),
        format!("package_name=Ascend-cann-toolkit\nversion={version}\narch={ARCH}\nos=linux\n"),
    )?;
    let release = chosen.map(|cann| format!("export ASCEND_EMU_CANN={}\n", cann.name()));
    let script = format!("{SET_ENV}{}", release.unwrap_or_default());
    fs::write(folder.join("set_env.sh"), script)?;
    let folder = fs::canonicalize(folder)?;
    Ok(format!("PyTorch:  source {}/set_env.sh && python -c 'import torch, torch_npu'", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_script_leads_to_the_folder_that_it_lies_in() {
        let home = tempfile::tempdir().unwrap();
        furnish(home.path(), Some(Cann::V8_5)).unwrap();
        let moved = home.path().join("moved here");
        fs::create_dir(&moved).unwrap();
        fs::rename(home.path().join("set_env.sh"), moved.join("set_env.sh")).unwrap();
        let output = Command::new("bash")
            .arg("-euc")
            .arg(r#"source "$0"; echo "$ASCEND_HOME_PATH|$ASCEND_OPP_PATH|$LD_LIBRARY_PATH|$ASCEND_EMU_CANN""#)
            .arg(moved.join("set_env.sh"))
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .unwrap();
        let moved = moved.canonicalize().unwrap();
        let moved = moved.display();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{moved}|{moved}/opp|{moved}/lib64|8.5\n"));
    }

    #[test]
    fn every_file_states_the_version() {
        let home = tempfile::tempdir().unwrap();
        furnish(home.path(), None).unwrap();
        let stated = format!("{}.0", Cann::NEWEST.name());
        let info = format!("{ARCH}-linux/ascend_toolkit_install.info");
        for file in ["opp/version.info", "runtime/version.info", "compiler/version.info", &info] {
            let text = fs::read_to_string(home.path().join(file)).unwrap();
            let version = text.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                key.eq_ignore_ascii_case("version").then_some(value)
            });
            assert_eq!(version, Some(stated.as_str()), "{file}");
        }
    }
}
