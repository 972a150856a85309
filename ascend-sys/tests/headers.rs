//! The headers are clean C99 and C++11, each by itself and all together.
#![allow(clippy::unwrap_used, clippy::panic)]

#[allow(dead_code, unreachable_pub)]
mod compiler;

use std::path::PathBuf;

use compiler::{Language, compile, include};

/// Every header, relative to the folder `include`.
fn headers() -> Vec<String> {
    let mut headers = Vec::new();
    for folder in ["acl", "aclnn", "aclnn/opdev", "aclnnop"] {
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

fn assert_clean(source: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("-I{}", include().display());
    let arguments = [
        "-fsyntax-only",
        "-pedantic",
        "-Wall",
        "-Wextra",
        "-Werror",
        &path,
    ];
    for language in [Language::C99, Language::Cpp11] {
        if let Err(error) = compile(language, folder.path(), source, arguments) {
            panic!("as {language:?}:\n{source}\n{error}");
        }
    }
}

#[test]
fn each_header_compiles_alone() {
    let headers = headers();
    assert!(headers.len() >= 15, "{headers:?}");
    for header in headers {
        assert_clean(&format!("#include \"{header}\"\n"));
    }
}

#[test]
fn the_headers_compile_together_in_any_order_and_twice() {
    let forward: String = headers()
        .iter()
        .map(|h| format!("#include \"{h}\"\n"))
        .collect();
    let backward: String = headers()
        .iter()
        .rev()
        .map(|h| format!("#include <{h}>\n"))
        .collect();
    assert_clean(&format!("{forward}{backward}"));
    assert_clean(&format!("{backward}{forward}"));
}

#[test]
fn a_header_that_is_not_clean_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["-fsyntax-only", "-Werror"];
    for language in [Language::C99, Language::Cpp11] {
        assert!(compile(language, folder.path(), "int f(unknown x);\n", arguments).is_err());
    }
}
