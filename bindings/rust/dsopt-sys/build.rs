// SPDX-License-Identifier: Apache-2.0
//! Prints how to link dsopt: by pkg-config, or from the folders in DSOPT_LIB_DIR, which take precedence. Feature
//! `dlopen`: nothing is linked.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Libraries that libdsopt.a needs if there is no pkg-config file. gcc and c: rustc links with -nodefaultlibs.
const OF_ARCHIVE: [&str; 6] = ["stdc++", "m", "pthread", "dl", "gcc", "c"];

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}

fn fail(text: &str) -> ! {
    eprintln!("dsopt-sys: {text}");
    std::process::exit(1)
}

/// Returns the flags of pkg-config, or why there are none.
fn pkg_config(archive: bool) -> Result<Vec<String>, String> {
    let program = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let mut command = Command::new(&program);
    if archive {
        command.arg("--static");
    }
    let output = command
        .args(["--libs", "dsopt >= 0.3"])
        .output()
        .map_err(|error| format!("{}: {error}", Path::new(&program).display()))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_string());
    }
    let flags = String::from_utf8_lossy(&output.stdout);
    Ok(flags.split_whitespace().map(String::from).collect())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["DSOPT_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR", "PKG_CONFIG_SYSROOT_DIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let archive = feature("STATIC");
    if feature("DLOPEN") {
        if archive {
            fail("the features `static` and `dlopen` exclude each other");
        }
        // Part of the C library since glibc 2.34, where libdl is empty.
        println!("cargo:rustc-link-lib=dylib=dl");
        return;
    }
    if env::var_os("DOCS_RS").is_some() {
        return; // documentation links nothing
    }
    // One folder, or several as in PATH: the library's first, then those of its dependencies.
    let given: Vec<PathBuf> =
        env::var_os("DSOPT_LIB_DIR").map_or_else(Vec::new, |folders| env::split_paths(&folders).collect());
    let flags = match (pkg_config(archive), given.is_empty()) {
        (Ok(flags), _) => flags,
        (Err(_), false) if archive => OF_ARCHIVE.iter().map(|name| format!("-l{name}")).collect(),
        (Err(_), false) => Vec::new(),
        (Err(reason), true) => fail(&format!(
            "dsopt was not found: {reason}\nInstall dsopt, or set PKG_CONFIG_PATH to the folder of dsopt.pc or \
             DSOPT_LIB_DIR to that of the library, or use the feature `dlopen`."
        )),
    };
    let mut folders = given;
    folders.extend(flags.iter().filter_map(|flag| flag.strip_prefix("-L")).map(PathBuf::from));
    for folder in &folders {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
    println!("cargo:rustc-link-lib={}=dsopt", if archive { "static" } else { "dylib" });
    // Other flags (-Wl,-z,nodelete) cannot be passed on to the crates that use this one.
    for name in flags.iter().filter_map(|flag| flag.strip_prefix("-l")) {
        if name != "dsopt" {
            println!("cargo:rustc-link-lib={}{name}", if archive { "dylib=" } else { "" });
        }
    }
    let file = if archive { "libdsopt.a" } else { "libdsopt.so" };
    if let Some(folder) = folders.iter().find(|folder| folder.join(file).exists()) {
        println!("cargo:rerun-if-changed={}", folder.join(file).display());
        // DEP_DSOPT_LIBDIR of crates that depend on this one, for an rpath.
        let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
        println!("cargo:libdir={}", folder.display());
        if !archive {
            println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
        }
    }
}
