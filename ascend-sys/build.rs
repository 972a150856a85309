//! Does nothing unless feature `link` or `bindgen` is on.

#[cfg(feature = "bindgen")]
#[path = "build/generate.rs"]
mod generate;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "link")]
    link();
    #[cfg(feature = "bindgen")]
    if let Err(error) = regenerate() {
        for line in error.lines() {
            println!("cargo::error={line}");
        }
    }
}

/// Binds the libraries of the installed toolkit.
#[cfg(feature = "link")]
fn link() {
    let (mut transformer, mut communicators) = (false, false);
    for variable in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
        if let Some(home) = std::env::var_os(variable) {
            let folder = std::path::Path::new(&home).join("lib64");
            println!("cargo::rustc-link-search=native={}", folder.display());
            // Newer toolkits keep attention in a library of its own.
            transformer |= folder.join("libopapi_transformer.so").is_file();
            communicators |= folder.join("libhcomm.so").is_file();
        }
    }
    // They keep communicators apart from collectives as well.
    if communicators {
        println!("cargo::rustc-link-lib=dylib=hcomm");
    }
    if transformer {
        println!("cargo::rustc-link-lib=dylib=opapi_transformer");
    }
    for library in ["hccl", "opapi", "nnopbase", "ascendcl"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
}

/// Writes `bindings.rs` and `names.rs` into the build's folder.
#[cfg(feature = "bindgen")]
fn regenerate() -> Result<(), String> {
    use std::path::PathBuf;

    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let here = variable("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?;
    let out = variable("OUT_DIR").ok_or("OUT_DIR is not set")?;
    println!("cargo::rerun-if-changed=build/generate.rs");
    println!("cargo::rerun-if-changed=include");
    println!("cargo::rerun-if-env-changed=ASCEND_HOME_PATH");
    let toolkit = variable("ASCEND_HOME_PATH").map(|home| home.join("include"));
    if let Some(toolkit) = &toolkit {
        println!("cargo::rerun-if-changed={}", toolkit.display());
    }
    let generated = generate::generate(&here.join("include"), toolkit.as_deref())?;
    let files = [("bindings.rs", generated.bindings), ("names.rs", generated.names)];
    for (name, text) in files {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}
