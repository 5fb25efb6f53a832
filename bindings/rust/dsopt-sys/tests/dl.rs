// SPDX-License-Identifier: Apache-2.0
//! Feature `dlopen`: a file that is not the library leads to an error text, and the library is loaded only once.
#![cfg(feature = "dlopen")]
use std::ffi::OsStr;

#[test]
fn load_reports_errors_and_can_be_retried() {
    for (path, text) in [("/dev/null", "/dev/null"), ("a\0b", "NUL"), ("libc.so.6", "no function dsopt_version")] {
        // SAFETY: none of them is dsopt, and all of them are rejected.
        let error = unsafe { dsopt_sys::load(Some(OsStr::new(path))) }.unwrap_err();
        assert!(error.contains(text), "{error}");
    }
    dsopt_sys::check_abi().unwrap();
    // SAFETY: the library is already loaded, so the path is not used.
    unsafe { dsopt_sys::load(Some(OsStr::new("/dev/null"))) }.unwrap();
    // SAFETY: no preconditions.
    assert!(unsafe { dsopt_sys::dsopt_version() } >= 200);
}
