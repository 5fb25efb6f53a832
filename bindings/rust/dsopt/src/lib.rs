// SPDX-License-Identifier: Apache-2.0
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

mod builder;
mod checkpoint;
mod comm;
mod compressed;
mod context;
mod error;
mod group;
mod lists;
mod lock;
mod muon;
mod optimizer;
mod panics;
mod report;
mod scaler;
mod state;
mod step;
mod table;
mod tensor;

pub use builder::{Nonfinite, OptimizerBuilder, Shard};
pub use checkpoint::LoadOptions;
pub use comm::{Comm, CommHandle, CommId, CommInfo, CommKind, Op};
pub use compressed::{Compressed, Errors};
pub use context::{Context, ContextBuilder, LogLevel, ParallelFor};
pub use error::{Error, ErrorKind, Result};
pub use group::{
    Adagrad, Adam, AdamLegacy, AdamW, Group, Lamb, Lion, Moment, OneBitAdam, OneBitLamb, Param, Sgd, ZeroOneAdam,
};
pub use lists::{Norm, NormResult};
pub use muon::{Adjust, Muon, NsSchedule};
pub use optimizer::{Applier, Key, Optimizer, Reduction, Reset};
pub use report::{Report, SkipReasons, StepReport};
pub use scaler::{Profile, Scaler, ScalerInfo, ScalerOptions};
pub use state::{Schedule, StateInfo, View};
pub use step::{Hyper, Step};
pub use table::{Collectives, CommFailure, Reduce, Values};
pub use tensor::{Array, Dtype, Element, TensorMut, TensorRef, BF16, F16, F8E4M3};

/// The C interface, for functions that this crate does not wrap.
pub use dsopt_sys as sys;

use std::ffi::{CStr, OsStr};

/// With the feature `dlopen`: load the library from this path. Call it before any other function; otherwise the first
/// context loads the library by its soname. Without the feature it does nothing.
///
/// # Safety
/// The file is a library of dsopt.
pub unsafe fn load(path: &OsStr) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe { sys::load(Some(path)) }.map_err(|reason| Error::new(sys::DSOPT_ERR_MISSING, reason))
}

/// Description of the loaded library as JSON: version, backends, instruction set and so on.
pub fn build_info() -> Result<&'static str> {
    sys::check_abi().map_err(|reason| Error::new(sys::DSOPT_ERR_MISSING, reason))?;
    // SAFETY: the function has no preconditions, and its text is static.
    let text = unsafe { CStr::from_ptr::<'static>(sys::dsopt_build_info()) };
    text.to_str().map_err(|_| Error::new(sys::DSOPT_ERR_INTERNAL, "dsopt_build_info is no UTF-8"))
}
