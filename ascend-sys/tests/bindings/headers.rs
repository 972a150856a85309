//! The headers are clean C99 and C++11, each by itself and all together.

use crate::compiler::{Language, compile, headers, include};

const FOLDERS: &[&str] = &["acl", "aclnn", "aclnn/opdev", "aclnnop", "hccl"];

fn assert_clean(source: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("-I{}", include().display());
    let arguments = ["-fsyntax-only", "-pedantic", "-Wall", "-Wextra", "-Werror", &path];
    for language in [Language::C99, Language::Cpp11] {
        if let Err(error) = compile(language, folder.path(), source, arguments) {
            panic!("as {language:?}:\n{source}\n{error}");
        }
    }
}

#[test]
fn each_header_compiles_alone() {
    let headers = headers(FOLDERS);
    assert!(headers.len() >= 15, "{headers:?}");
    for header in headers {
        assert_clean(&format!("#include \"{header}\"\n"));
    }
}

#[test]
fn the_headers_compile_together_in_any_order_and_twice() {
    let forward: String = headers(FOLDERS).iter().map(|h| format!("#include \"{h}\"\n")).collect();
    let backward: String = headers(FOLDERS).iter().rev().map(|h| format!("#include <{h}>\n")).collect();
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
