//! The headers of a toolkit folder: each compiles alone, as C and as C++, and all of them together.

use crate::{TARGET, operator_headers, repository, succeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A compiler that looks at files and writes nothing.
fn look(cpp: bool, include: &Path) -> Command {
    let mut build = cc::Build::new();
    build
        .cargo_metadata(false)
        .cpp(cpp)
        .target(TARGET)
        .host(env!("EMULATION_HOST"))
        .opt_level(0)
        .debug(false)
        .warnings(false);
    let mut command = build.get_compiler().to_command();
    let language = match cpp {
        true => ["-x", "c++", "-std=c++11"],
        false => ["-x", "c", "-std=c99"],
    };
    command
        .args(language)
        .args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg("-I")
        .arg(include)
        .arg("-I")
        .arg(repository().join("include"));
    command
}

#[test]
fn every_header_compiles_alone_and_with_all_others() {
    let folder = tempfile::tempdir().unwrap();
    let count = operator_headers::write(repository(), folder.path()).unwrap();
    let own = repository().join("include");
    let of = |folder: PathBuf| {
        let files = fs::read_dir(folder).unwrap();
        files.map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    let mut files = of(folder.path().join("aclnnop"));
    assert_eq!(files.len(), count);
    files.extend(of(own.join("aclnnop")));
    files.extend(["acl_meta.h", "aclnn_base.h"].map(|name| own.join("aclnn").join(name)));
    let mut all = String::new();
    for file in &files {
        let folder = file.parent().and_then(Path::file_name).unwrap();
        let name = Path::new(folder).join(file.file_name().unwrap());
        all += &format!("#include \"{}\"\n", name.display());
    }
    let together = folder.path().join("together.inc");
    fs::write(&together, all).unwrap();
    files.push(together);
    // What programs that include aclnn_base.h alone take from it, as from the toolkit's.
    let base = folder.path().join("base.inc");
    let text = "#include \"aclnn/aclnn_base.h\"\naclTensor *tensor;\naclIntArray *ints;\naclrtStream stream;\n";
    fs::write(&base, text).unwrap();
    files.push(base);
    for cpp in [false, true] {
        succeed(look(cpp, folder.path()).args(&files));
    }
}
