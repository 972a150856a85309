//! Does nothing unless feature `link` is on: then the programs, tests and examples of this package find the toolkit's
//! libraries when they run, in the folder where they were linked. A package that depends on this one says so in a build
//! script of its own, since cargo hands no arguments on to the linker of another package.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LINK").is_none() {
        return;
    }
    for variable in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
        if let Some(home) = env::var_os(variable).filter(|home| !home.is_empty()) {
            let folder = Path::new(&home).join("lib64");
            println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
        }
    }
}
