//! Loading: what is missing is named, and nothing panics.

use std::path::Path;
use std::ptr;

use crate::compiler::{Language, compile};
use ascend_sys::{Api, Library, LoadError, Outcome, Search};

/// Makes a library of a C source.
fn library(folder: &Path, file: &str, source: &str) {
    let path = folder.join(file);
    let arguments = ["-shared", "-fPIC", "-o", path.to_str().unwrap()];
    if let Err(error) = compile(Language::C11, folder, source, arguments) {
        panic!("{error}");
    }
}

/// Loads from a folder and nowhere else.
fn load(folder: &Path) -> Result<Api, LoadError> {
    // SAFETY: the folders here hold nothing but what the tests put there, with the signatures of the headers.
    unsafe { Api::load_with(&Search::new().folder(folder)) }
}

#[test]
fn an_empty_folder_is_an_error_that_lists_every_path() {
    let folder = tempfile::tempdir().unwrap();
    let error = load(folder.path()).unwrap_err();
    assert!(error.is_absent());
    let required: Vec<Library> = Library::ALL.into_iter().filter(|library| library.is_required()).collect();
    assert_eq!(error.missing, required);
    let text = error.to_string();
    for file in ["libascendcl.so", "libnnopbase.so", "libopapi.so", "libopapi_transformer.so"] {
        let path = folder.path().join(file);
        assert!(text.contains(&format!("{}: no such file", path.display())), "{text}");
    }
    for variable in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH"] {
        assert!(text.contains(variable), "{text}");
    }
    assert_eq!(error, error.clone());
}

#[test]
fn the_loader_path_is_tried_last_and_told_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let search = Search::new().folder(folder.path()).loader_path();
    // SAFETY: the folder is empty; what the machine's own loader finds under these names is CANN.
    let Err(error) = (unsafe { Api::load_with(&search) }) else {
        return; // CANN is installed on this machine.
    };
    let tried: Vec<&Path> = error
        .attempts
        .iter()
        .filter(|attempt| attempt.file == "libascendcl.so")
        .map(|attempt| attempt.path.as_path())
        .collect();
    assert_eq!(tried, [&folder.path().join("libascendcl.so"), Path::new("libascendcl.so")]);
    assert!(error.to_string().contains("libascendcl.so (on the loader's search path)"));
}

#[test]
fn a_missing_symbol_names_library_and_symbol_and_spares_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let source = "int aclInit(const char *path) { return path ? 100000 : 0; }\n";
    library(folder.path(), "libascendcl.so", source);
    library(folder.path(), "libnnopbase.so", "int unrelated_nnopbase;\n");
    library(folder.path(), "libopapi.so", "int unrelated_opapi;\n");

    let api = load(folder.path()).unwrap();
    let init = api.aclInit().unwrap();
    // SAFETY: the library above takes any pointer.
    assert_eq!(unsafe { init(ptr::null()) }, 0);
    assert!(api.has("aclInit"));

    for (missing, library, symbol) in [
        (api.aclFinalize().unwrap_err(), "libascendcl.so", "aclFinalize"),
        (api.aclCreateIntArray().unwrap_err(), "libnnopbase.so", "aclCreateIntArray"),
        (api.aclnnFusedInferAttentionScoreV4().unwrap_err(), "libopapi.so", "aclnnFusedInferAttentionScoreV4"),
    ] {
        assert_eq!((missing.library, missing.symbol), (library, symbol));
        assert!(!api.has(symbol));
        let text = missing.to_string();
        assert!(text.contains(library) && text.contains(symbol), "{text}");
    }
    // Asking again gives the same answer, and what is there stays there.
    assert!(api.aclFinalize().is_err() && api.aclInit().is_ok());

    let files: Vec<&str> = api.origin().libraries().map(|(file, _)| file).collect();
    assert_eq!(files, ["libascendcl.so", "libnnopbase.so", "libopapi.so"]);
    let expected = folder.path().join("libascendcl.so");
    assert!(api.origin().to_string().contains(expected.to_str().unwrap()));

    // A pointer outlives the table it came from.
    drop(api);
    // SAFETY: as above; libraries are never closed.
    assert_eq!(unsafe { init(c"x".as_ptr()) }, 100_000);
}

#[test]
fn either_operator_library_will_do_and_the_newer_one_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libascendcl.so", "int unrelated_ascendcl;\n");
    library(folder.path(), "libnnopbase.so", "int aclnnInit(const char *path) { (void)path; return 7; }\n");
    let error = load(folder.path()).unwrap_err();
    assert_eq!(error.missing, [Library::Opapi]);
    assert!(!error.is_absent());
    assert!(error.to_string().contains("libnnopbase.so: opened"), "{error}");

    let operator = |status: i32| {
        format!(
            "int aclnnFusedInferAttentionScore(void *w, unsigned long n, void *e, void *s)\n\
             {{ (void)w; (void)n; (void)e; (void)s; return {status}; }}\n"
        )
    };
    library(folder.path(), "libopapi_transformer.so", &operator(2));
    let call = |api: &Api| {
        let function = api.aclnnFusedInferAttentionScore().unwrap();
        // SAFETY: the libraries here ignore every argument.
        unsafe { function(ptr::null_mut(), 0, ptr::null_mut(), ptr::null_mut()) }
    };
    assert_eq!(call(&load(folder.path()).unwrap()), 2);
    library(folder.path(), "libopapi.so", &operator(1));
    assert_eq!(call(&load(folder.path()).unwrap()), 2);
}

#[test]
fn collectives_come_from_either_of_their_libraries_and_may_be_absent() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["libascendcl.so", "libnnopbase.so", "libopapi.so"] {
        let symbol = file.replace('.', "_");
        library(folder.path(), file, &format!("int {symbol};\n"));
    }
    let missing = load(folder.path()).unwrap().HcclCommDestroy().unwrap_err();
    assert_eq!((missing.library, missing.symbol), ("libhccl.so", "HcclCommDestroy"));

    let function = |name: &str, result: i32| {
        format!("int {name}(void *comm, void *other) {{ (void)comm; (void)other; return {result}; }}\n")
    };
    let operators = function("HcclBarrier", 1) + &function("HcclGetRankId", 2);
    library(folder.path(), "libhccl.so", &operators);
    library(folder.path(), "libhcomm.so", &(function("HcclGetRankId", 3) + &function("HcclGetRankSize", 4)));
    let api = load(folder.path()).unwrap();
    let null = ptr::null_mut();
    // SAFETY: the libraries here ignore every argument.
    let results = unsafe {
        [
            api.HcclBarrier().unwrap()(null, null),
            api.HcclGetRankId().unwrap()(null, null.cast()),
            api.HcclGetRankSize().unwrap()(null, null.cast()),
        ]
    };
    // What both have is the operators' library's.
    assert_eq!(results.map(|result| result.0), [1, 2, 4]);
    assert!(api.HcclCommDestroy().is_err());
}

#[test]
fn a_file_that_is_no_library_is_broken_and_not_absent() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libascendcl.so"), "not a library").unwrap();
    let error = load(folder.path()).unwrap_err();
    assert!(!error.is_absent());
    let first = &error.attempts[0];
    assert_eq!(first.path, folder.path().join("libascendcl.so"));
    assert!(matches!(&first.outcome, Outcome::Failed(text) if !text.is_empty()), "{error}");
}

#[test]
fn the_first_folder_that_can_be_used_wins() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(first.path().join("libascendcl.so"), "not a library").unwrap();
    for file in ["libascendcl.so", "libnnopbase.so", "libopapi.so"] {
        let symbol = file.replace('.', "_");
        library(second.path(), file, &format!("int second_{symbol};\n"));
    }
    let search = Search::new().folder(first.path()).folder(second.path());
    assert!(search.is_available());
    // SAFETY: the folders hold nothing but what was put there above.
    let api = unsafe { Api::load_with(&search) }.unwrap();
    assert!(api.origin().libraries().all(|(_, path)| path.starts_with(second.path())));
    assert!(api.aclInit().is_err());
}

#[test]
fn one_file_under_the_three_names_is_one_instance() {
    let folder = tempfile::tempdir().unwrap();
    let source = "static int calls;\n\
                  int aclInit(const char *path) { (void)path; return ++calls; }\n\
                  int aclnnInit(const char *path) { (void)path; return ++calls; }\n";
    library(folder.path(), "libone.so", source);
    for name in ["libascendcl.so", "libnnopbase.so", "libopapi.so"] {
        std::os::unix::fs::symlink("libone.so", folder.path().join(name)).unwrap();
    }
    let api = load(folder.path()).unwrap();
    let (acl, aclnn) = (api.aclInit().unwrap(), api.aclnnInit().unwrap());
    // SAFETY: the library above ignores the path.
    let calls = unsafe { [acl(ptr::null()), aclnn(ptr::null()), acl(ptr::null())] };
    assert_eq!(calls, [1, 2, 3]);
}
