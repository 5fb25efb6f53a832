// SPDX-License-Identifier: Apache-2.0
//! The C interface of dsopt, as `dsopt.h` declares it.
//!
//! Names are those of the header, which is the reference. Constants are `i32`, like the fields and arguments that use
//! them. Structs that begin with `size` are zeroed, which [`zeroed!`] does, and `size` is set. [`check_abi`] must be
//! called before any other function.
//!
//! | feature | the library |
//! | --- | --- |
//! | none | is linked shared, as `pkg-config --libs dsopt` says, or from the folder `DSOPT_LIB_DIR` |
//! | `static` | is linked from `libdsopt.a`, with the libraries that `pkg-config --static` names |
//! | `dlopen` | is loaded at run time by [`load`], instead of linking |
#![allow(non_camel_case_types)]

#[rustfmt::skip]
mod bindings;
pub use bindings::*;

#[cfg(feature = "dlopen")]
mod dl;
#[cfg(feature = "dlopen")]
pub use dl::load;

use std::ffi::OsStr;

/// Load the library at run time. Without the feature `dlopen` it is linked, and this does nothing.
///
/// `path` is the soname if it is `None`. A second call does nothing, whatever its path.
///
/// # Safety
/// The file is a library of dsopt.
#[cfg(not(feature = "dlopen"))]
pub unsafe fn load(path: Option<&OsStr>) -> Result<(), String> {
    let _ = path;
    Ok(())
}

/// Compare the library's ABI with the one for which this crate was written. Loads the library if needed.
pub fn check_abi() -> Result<(), String> {
    // SAFETY: the soname is dsopt's, as for programs that are linked to it.
    unsafe { load(None::<&OsStr>) }?;
    // SAFETY: the function has no preconditions.
    let found = unsafe { dsopt_abi_version() };
    if found == DSOPT_ABI_VERSION {
        return Ok(());
    }
    Err(format!("the library has ABI {found}, this crate is for ABI {DSOPT_ABI_VERSION}"))
}

/// A zeroed struct whose `size` is set: `let mut step = zeroed!(dsopt_step);`
#[macro_export]
macro_rules! zeroed {
    ($kind:ident) => {{
        // SAFETY: numbers and pointers that may be NULL: zeros are valid for every struct that has a `size`.
        let mut value: $crate::$kind = unsafe { ::std::mem::zeroed() };
        value.size = ::std::mem::size_of::<$crate::$kind>();
        value
    }};
}
