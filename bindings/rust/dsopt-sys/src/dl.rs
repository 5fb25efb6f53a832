// SPDX-License-Identifier: Apache-2.0
//! The functions of a library that is loaded at run time.
use crate::bindings::Functions;
use std::ffi::{CStr, CString, OsStr};
use std::os::raw::{c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Mutex;

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;
const SONAME: &str = "libdsopt.so.2";

/// Set once, and never freed: the library stays loaded.
static LOADED: AtomicPtr<Functions> = AtomicPtr::new(ptr::null_mut());
static LOADING: Mutex<()> = Mutex::new(());

/// Load the library: `path`, or its soname where the dynamic linker looks if it is `None`.
///
/// A second call does nothing, whatever its path. A function that is called before this one loads the library by its
/// soname, and panics if that fails.
///
/// # Safety
/// The file is a library of dsopt: its initialisers run, and its functions are called with the signatures of `dsopt.h`.
pub unsafe fn load(path: Option<&OsStr>) -> Result<(), String> {
    let _one_at_a_time = LOADING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if !LOADED.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let path = path.unwrap_or_else(|| OsStr::new(SONAME));
    let name = CString::new(path.as_bytes()).map_err(|_| "the path has a NUL in it".to_string())?;
    // SAFETY: a string of C; the caller promises that the file is a library of dsopt.
    let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
    if library.is_null() {
        return Err(reason());
    }
    let functions = Functions::find(library)?;
    LOADED.store(Box::into_raw(Box::new(functions)), Ordering::Release);
    Ok(())
}

/// Returns why the last call of this thread failed.
fn reason() -> String {
    // SAFETY: dlerror has no preconditions; its result is valid until the thread's next call.
    unsafe {
        let text = dlerror();
        if text.is_null() {
            return "the dynamic linker gives no reason".to_string();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

pub(crate) fn find(library: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    let terminated = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: a library that dlopen returned, and a string of C.
    let found = unsafe { dlsym(library, terminated.as_ptr()) };
    if found.is_null() {
        return Err(format!("the library has no function {name}: {}", reason()));
    }
    Ok(found)
}

pub(crate) fn table() -> &'static Functions {
    let loaded = LOADED.load(Ordering::Acquire);
    if loaded.is_null() {
        // SAFETY: the soname is dsopt's, as for programs that are linked to it.
        if let Err(reason) = unsafe { load(None) } {
            panic!("dsopt could not be loaded: {reason}");
        }
        return table();
    }
    // SAFETY: from Box::into_raw, and never freed.
    unsafe { &*loaded }
}

/// A table of pointers, and functions of the same names that call through it.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        pub(crate) struct Functions {
            $($name: unsafe extern "C" fn($($kind),*) $(-> $result)?,)*
        }

        impl Functions {
            pub(crate) fn find(library: *mut c_void) -> Result<Functions, String> {
                Ok(Functions {
                    $($name: {
                        let found = $crate::dl::find(library, stringify!($name))?;
                        // SAFETY: a function of dsopt, with the signature that its header declares.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) $(-> $result)?>(found)
                        }
                    },)*
                })
            }
        }

        $(
            /// # Safety
            /// As `dsopt.h` says.
            #[allow(clippy::too_many_arguments)]
            pub unsafe fn $name($($argument: $kind),*) $(-> $result)? {
                ($crate::dl::table().$name)($($argument),*)
            }
        )*
    };
}
pub(crate) use functions;
