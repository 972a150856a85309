//! Keeps the library loaded until the process ends, since its threads outlive any `dlclose`, and tells the tests which
//! C compiler to look for.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
    for name in ["TARGET", "HOST"] {
        let triple = var(name).unwrap_or_default();
        println!("cargo::rustc-env=EMULATION_{name}={triple}");
    }
}
