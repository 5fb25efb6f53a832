// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, owned};
use crate::lock::{Guard, Lock};
use crate::tensor::list_mut;
use crate::{panics, sys, Context, Error, Result, TensorMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A loss scale that adapts automatically. A clone is another handle to the same scaler.
///
/// Threads may share it: one call on the scaler, or one step of an optimizer that has it, runs at a time, and others
/// wait. So ranks that are threads need one scaler each: a step waits for the other ranks.
#[derive(Clone, Debug)]
pub struct Scaler {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: NonNull<sys::dsopt_scaler>,
    context: Context,
    lock: Lock,
}

// SAFETY: the lock ensures that one thread at a time is in a call that reads or writes the scaler's memory.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and this is its last use.
        panics::discard(|| unsafe { sys::dsopt_scaler_destroy(self.handle.as_ptr()) });
    }
}

/// Defaults of scaler options that are not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profile {
    /// Starts at 2^16, minimum 1.
    #[default]
    Default = 0,
    /// DeepSpeed's FP16_Optimizer: starts at 2^32, minimum 1.
    Fused = 1,
    /// DeepSpeed's FP16_UnfusedOptimizer: starts at 2^16, minimum 0.25.
    Unfused = 2,
    /// DeepSpeed's DynamicLossScaler: starts at 2^32, minimum 1, fails at the minimum.
    Dynamic = 3,
}

/// Options of a [`Scaler`]. A number that is 0 has the profile's value.
///
/// ```
/// let ctx = dsopt::Context::cpu()?;
/// let scaler = dsopt::Scaler::new(&ctx, dsopt::ScalerOptions { init: 1024.0, window: 500, ..Default::default() })?;
/// assert_eq!(scaler.scale()?, 1024.0);
/// # Ok::<(), dsopt::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScalerOptions {
    /// Defaults of options that are 0.
    pub profile: Profile,
    /// Initial scale.
    pub init: f64,
    /// Factor by which the scale is multiplied or divided.
    pub factor: f64,
    /// Smallest scale.
    pub min: f64,
    /// Largest scale; 0 is none.
    pub max: f64,
    /// Number of good steps until the scale grows.
    pub window: i32,
    /// Number of overflows until the scale shrinks.
    pub hysteresis: i32,
    /// The scale never changes automatically.
    pub fixed: bool,
    /// Every good step refills the hysteresis budget.
    pub refill: bool,
    /// For several optimizers: steps only record overflow, and [`Scaler::update`] updates the scale once per iteration.
    pub shared: bool,
    /// An overflow at the minimum counts as a failure and changes nothing else.
    pub fail_at_min: bool,
    /// The dynamic profile without `fail_at_min`.
    pub keep_at_min: bool,
    /// Grow in the step that completes the window, and not in the next one.
    pub growth_at_window: bool,
}

/// Values of a scaler.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ScalerInfo {
    /// Scale for the next backward pass.
    pub scale: f64,
    /// The dynamic scale, without an override.
    pub dynamic: f64,
    /// Transitions so far.
    pub updates: i64,
    /// Number of the last transition with an overflow.
    pub last_overflow: Option<i64>,
    /// Overflows left until the scale shrinks.
    pub hysteresis: i32,
    /// True while an override is set.
    pub overridden: bool,
    /// Overflows at the minimum.
    pub failures: i32,
    /// Transitions with an overflow in a row.
    pub skipped_in_row: i32,
}

impl From<sys::dsopt_scaler_info> for ScalerInfo {
    fn from(raw: sys::dsopt_scaler_info) -> ScalerInfo {
        ScalerInfo {
            scale: raw.scale,
            dynamic: raw.dynamic,
            updates: raw.updates,
            last_overflow: Some(raw.last_overflow).filter(|&number| number >= 0),
            hysteresis: raw.hysteresis,
            overridden: raw.overridden != 0,
            failures: raw.failures,
            skipped_in_row: raw.skipped_in_row,
        }
    }
}

impl Scaler {
    /// Make a scaler.
    pub fn new(context: &Context, options: ScalerOptions) -> Result<Scaler> {
        let mut desc = sys::zeroed!(dsopt_scaler_desc);
        desc.profile = options.profile as i32;
        desc.init = options.init;
        desc.factor = options.factor;
        desc.min = options.min;
        desc.max = options.max;
        desc.window = options.window;
        desc.hysteresis = options.hysteresis;
        for (set, flag) in [
            (options.fixed, sys::DSOPT_SCALER_STATIC),
            (options.refill, sys::DSOPT_SCALER_REFILL),
            (options.shared, sys::DSOPT_SCALER_SHARED),
            (options.fail_at_min, sys::DSOPT_SCALER_FAIL_AT_MIN),
            (options.keep_at_min, sys::DSOPT_SCALER_KEEP_AT_MIN),
            (options.growth_at_window, sys::DSOPT_SCALER_GROWTH_AT_WINDOW),
        ] {
            if set {
                desc.flags |= flag;
            }
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the context lives, and desc and pointer are valid.
        let status = unsafe { sys::dsopt_scaler_create(context.as_ptr(), &desc, &mut handle) };
        let inner = |handle| Inner { handle, context: context.clone(), lock: Lock::default() };
        owned(status, NonNull::new(handle).map(|handle| Scaler { inner: Arc::new(inner(handle)) }))
    }

    /// Locks the scaler for calls that use its memory, here or in a step.
    pub(crate) fn enter(&self) -> Result<Guard<'_>> {
        self.inner.lock.enter("scaler")
    }

    /// The handle, for calls of `dsopt-sys`. It is valid as long as this scaler.
    pub fn as_ptr(&self) -> *mut sys::dsopt_scaler {
        self.inner.handle.as_ptr()
    }

    /// Factor of the loss for the next backward pass. On CUDA it waits for earlier calls.
    pub fn scale(&self) -> Result<f64> {
        Ok(self.query()?.scale)
    }

    /// Current values. On CUDA it waits for earlier calls.
    pub fn query(&self) -> Result<ScalerInfo> {
        let _inside = self.enter()?;
        let mut info = sys::zeroed!(dsopt_scaler_info);
        // SAFETY: the handle lives, and the lock is held.
        check(unsafe { sys::dsopt_scaler_query(self.as_ptr(), &mut info) })?;
        Ok(info.into())
    }

    /// Multiply a loss of one element by the scale, in place.
    pub fn scale_loss(&self, loss: &mut TensorMut<'_>) -> Result<()> {
        let _inside = self.enter()?;
        let loss = list_mut(std::slice::from_mut(loss));
        // SAFETY: the handle lives, the lock is held, and the loss is borrowed mutably.
        check(unsafe { sys::dsopt_scaler_scale_loss(self.as_ptr(), loss, ptr::null_mut()) })
    }

    /// Set the dynamic scale.
    pub fn set(&self, scale: f64) -> Result<()> {
        self.set_what(sys::DSOPT_SCALE_VALUE, scale)
    }

    /// Use another scale instead of the dynamic one, which then does not change. `None` ends that.
    pub fn override_scale(&self, scale: Option<f64>) -> Result<()> {
        match scale {
            Some(scale) => self.set_what(sys::DSOPT_SCALE_OVERRIDE, scale),
            None => self.set_what(sys::DSOPT_SCALE_CLEAR_OVERRIDE, 0.0),
        }
    }

    fn set_what(&self, what: i32, value: f64) -> Result<()> {
        let _inside = self.enter()?;
        // SAFETY: the handle lives, and the lock is held.
        check(unsafe { sys::dsopt_scaler_set(self.as_ptr(), what, value, ptr::null_mut()) })
    }

    /// Execute one transition: for a shared scaler once per iteration, with `None` for the overflows that its
    /// optimizers recorded; for a scaler without optimizers with the caller's value.
    pub fn update(&self, overflow: Option<bool>) -> Result<()> {
        if overflow.is_some() {
            self.inner.context.host_only("overflow")?;
        }
        let _inside = self.enter()?;
        let word = overflow.map(i32::from);
        let word = word.as_ref().map_or(ptr::null(), |word| word as *const i32);
        // SAFETY: the handle lives, the lock is held, and the word outlives the call.
        check(unsafe { sys::dsopt_scaler_update(self.as_ptr(), word, ptr::null_mut()) })
    }

    /// Detach the optimizers that have this scaler, so that a new one can use it. Their next step fails.
    pub fn detach(&self) -> Result<()> {
        let _inside = self.enter()?;
        // SAFETY: the handle lives, and the lock is held.
        check(unsafe { sys::dsopt_scaler_detach(self.as_ptr()) })
    }

    /// The functional form: initial values of the state tensors "loss_scale" and "scaler".
    pub fn init_state(&self, loss_scale: &mut [f32; 1], words: &mut [i32; 12]) -> Result<()> {
        self.inner.context.host_only("scaler state")?;
        let mut state = [loss_scale.into(), words.into()];
        // SAFETY: both tensors are borrowed mutably. The scaler's memory is not used.
        check(unsafe { sys::dsopt_scaler_init_state(self.as_ptr(), list_mut(&mut state), 2, ptr::null_mut()) })
    }

    /// The functional form: one transition of the state tensors "loss_scale" and "scaler".
    pub fn update_arrays(
        &self,
        loss_scale: &mut [f32; 1],
        words: &mut [i32; 12],
        overflow: Option<bool>,
    ) -> Result<()> {
        self.inner.context.host_only("scaler state")?;
        let mut state = [loss_scale.into(), words.into()];
        let word = overflow.map(i32::from);
        let word = word.as_ref().map_or(ptr::null(), |word| word as *const i32);
        // SAFETY: both tensors are borrowed mutably, and the word outlives the call. The scaler's memory is not used.
        check(unsafe { sys::dsopt_scaler_update_arrays(self.as_ptr(), list_mut(&mut state), 2, word, ptr::null_mut()) })
    }

    /// Decode the words of the state tensor "scaler".
    pub fn decode(words: &[i32; 12]) -> Result<ScalerInfo> {
        sys::check_abi().map_err(|reason| Error::new(sys::DSOPT_ERR_MISSING, reason))?;
        let mut info = sys::zeroed!(dsopt_scaler_info);
        // SAFETY: twelve words of host memory, and a struct whose size is set.
        check(unsafe { sys::dsopt_scaler_decode(words.as_ptr(), &mut info) })?;
        Ok(info.into())
    }
}
