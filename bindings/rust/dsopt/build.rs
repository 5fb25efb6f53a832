// SPDX-License-Identifier: Apache-2.0
//! An rpath for the tests and examples of this crate, so that they find a library that is not installed system-wide.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let linked_shared =
        ["STATIC", "DLOPEN"].iter().all(|name| std::env::var_os(format!("CARGO_FEATURE_{name}")).is_none());
    if let (true, Some(folder)) = (linked_shared, std::env::var_os("DEP_DSOPT_LIBDIR")) {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.to_string_lossy());
    }
}
