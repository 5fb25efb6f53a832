// SPDX-License-Identifier: Apache-2.0
use crate::{panics, sys};
use std::ffi::CStr;
use std::{fmt, io};

/// The result of every function that can fail.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! kinds {
    ($($(#[$text:meta])* $kind:ident = $status:ident,)*) => {
        /// Kind of a failure: the statuses of `dsopt.h`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$text])* $kind,)*
            /// A status that is newer than this crate.
            Unknown,
        }

        impl ErrorKind {
            fn of(status: i32) -> ErrorKind {
                match status {
                    $(sys::$status => ErrorKind::$kind,)*
                    _ => ErrorKind::Unknown,
                }
            }

            fn name(self) -> &'static str {
                match self {
                    $(ErrorKind::$kind => stringify!($status),)*
                    ErrorKind::Unknown => "unknown status",
                }
            }
        }
    };
}

kinds! {
    /// An argument is out of range or not finite.
    Argument = DSOPT_ERR_ARGUMENT,
    /// A number of elements or of tensors differs from what was registered.
    Shape = DSOPT_ERR_SHAPE,
    /// A dtype is wrong for its list.
    Dtype = DSOPT_ERR_DTYPE,
    /// A pointer is not aligned to its element.
    Alignment = DSOPT_ERR_ALIGNMENT,
    /// Two tensors share bytes.
    Overlap = DSOPT_ERR_OVERLAP,
    /// A tensor is in memory of another device.
    Device = DSOPT_ERR_DEVICE,
    /// The workspace is too small.
    Workspace = DSOPT_ERR_WORKSPACE,
    /// Library and crate are not compatible.
    Version = DSOPT_ERR_VERSION,
    /// An option is not supported in this combination or build, or has no effect.
    Unsupported = DSOPT_ERR_UNSUPPORTED,
    /// The call is not possible in the current state.
    State = DSOPT_ERR_STATE,
    /// The object is in use by another thread, or by the call that runs this hook.
    Busy = DSOPT_ERR_BUSY,
    /// The object was made before `fork()`: the child can only drop it.
    Forked = DSOPT_ERR_FORKED,
    /// As many steps in a row were skipped as the skip budget allows.
    Skips = DSOPT_ERR_SKIPS,
    /// `parallel_for` did not run every index exactly once. Weights and state are partly undefined.
    Hook = DSOPT_ERR_HOOK,
    /// Out of memory.
    NoMemory = DSOPT_ERR_NOMEM,
    /// A library or driver is not on this machine.
    Missing = DSOPT_ERR_MISSING,
    /// Reading or writing failed.
    Io = DSOPT_ERR_IO,
    /// A defect of dsopt.
    Internal = DSOPT_ERR_INTERNAL,
    /// The device or its driver failed.
    Backend = DSOPT_ERR_BACKEND,
    /// A collective failed. The comm is unusable.
    Comm = DSOPT_ERR_COMM,
    /// A peer did not join in time. The comm is unusable.
    Timeout = DSOPT_ERR_TIMEOUT,
    /// The comm was aborted. It is unusable.
    Aborted = DSOPT_ERR_ABORTED,
    /// A file is not a checkpoint of dsopt.
    Format = DSOPT_ERR_FORMAT,
    /// Data of a checkpoint do not match their checksum.
    Checksum = DSOPT_ERR_CHECKSUM,
    /// A checkpoint, or another rank, does not match this optimizer.
    Mismatch = DSOPT_ERR_MISMATCH,
}

/// Failure of a call. The text names the argument, field or tensor.
///
/// A failed call changes nothing, except where `dsopt.h` says otherwise.
#[derive(Debug)]
pub struct Error {
    status: i32,
    text: String,
    source: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(status: i32, text: impl Into<String>) -> Error {
        Error { status, text: text.into(), source: None }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Error {
        Error::new(sys::DSOPT_ERR_ARGUMENT, text)
    }

    /// The last failure of this thread.
    fn last(status: i32) -> Error {
        // SAFETY: the text is never NULL, and valid until the thread's next failing call.
        let text = unsafe { CStr::from_ptr(sys::dsopt_last_error()) };
        Error::new(status, text.to_string_lossy())
    }

    pub(crate) fn with_source(mut self, source: Option<io::Error>) -> Error {
        self.source = source;
        self
    }

    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::of(self.status)
    }

    /// The number in `dsopt.h`.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The reason as text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.kind().name(), self.text)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|error| error as _)
    }
}

/// Converts the status of a call that has returned. Resumes a panic of a hook.
pub(crate) fn check(status: sys::dsopt_status) -> Result<()> {
    panics::resume();
    match status {
        sys::DSOPT_OK => Ok(()),
        status => Err(Error::last(status)),
    }
}

/// The result of a call that makes an object: `made` owns the handle, if there is one, before a panic of a hook
/// resumes.
pub(crate) fn owned<T>(status: sys::dsopt_status, made: Option<T>) -> Result<T> {
    check(status)?;
    made.ok_or_else(|| Error::new(sys::DSOPT_ERR_INTERNAL, "the library returned no object"))
}

/// Converts a count for C. Slices are never longer than `i64::MAX`.
pub(crate) fn count(length: usize) -> i64 {
    length as i64
}
