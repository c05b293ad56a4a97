//! Says where libcuflash is: in `CUFLASH_LIB_DIR`, where pkg-config knows it, or where the linker
//! looks anyway. Dependent crates get the directory as `DEP_CUFLASH_LIBDIR`, where there is one.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["CUFLASH_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rustc-link-lib=dylib=cuflash");
    if let Some(directory) = from_environment().or_else(from_pkg_config) {
        println!("cargo:rustc-link-search=native={directory}");
        println!("cargo:libdir={directory}");
    }
}

fn from_environment() -> Option<String> {
    env::var("CUFLASH_LIB_DIR").ok().filter(|directory| !directory.is_empty())
}

fn from_pkg_config() -> Option<String> {
    let pkg_config = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let output = Command::new(pkg_config).args(["--variable=libdir", "cuflash"]).output().ok()?;
    let directory = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !directory.is_empty()).then_some(directory)
}
