// SPDX-License-Identifier: Apache-2.0
use crate::sys;
use std::ffi::CStr;

/// Reasons for skipping a step. Several can be set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SkipReasons(i32);

impl SkipReasons {
    /// True if there is no reason: the step was not skipped.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Inf or NaN in a gradient.
    pub fn gradients(self) -> bool {
        self.0 & sys::DSOPT_SKIP_GRADIENTS != 0
    }

    /// A norm is not finite.
    pub fn norm(self) -> bool {
        self.0 & sys::DSOPT_SKIP_NORM != 0
    }

    /// The loss scale or `grad_scale` is not a valid divisor.
    pub fn scale(self) -> bool {
        self.0 & sys::DSOPT_SKIP_SCALE != 0
    }

    /// A hyper-parameter of the step is invalid.
    pub fn hyper(self) -> bool {
        self.0 & sys::DSOPT_SKIP_HYPER != 0
    }

    /// The caller requested it.
    pub fn caller(self) -> bool {
        self.0 & sys::DSOPT_SKIP_CALLER != 0
    }

    /// Another rank had a reason.
    pub fn peer(self) -> bool {
        self.0 & sys::DSOPT_SKIP_PEER != 0
    }
}

/// Report of one step, written by the step. Norms are of unscaled gradients before clipping.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    pub(crate) values: [f32; sys::DSOPT_REPORT_FLOATS as usize],
}

impl StepReport {
    fn value(&self, index: i32) -> f32 {
        self.values[index as usize]
    }

    fn known(&self, index: i32) -> Option<f32> {
        Some(self.value(index)).filter(|&value| value >= 0.0) // else NaN, or -1 with no_nan
    }

    /// True if the step was skipped.
    pub fn skipped(&self) -> bool {
        self.value(sys::DSOPT_REPORT_SKIPPED) != 0.0
    }

    /// Reasons for skipping it.
    pub fn reasons(&self) -> SkipReasons {
        SkipReasons(self.value(sys::DSOPT_REPORT_REASONS) as i32)
    }

    /// Norm of the gradients, if it was computed: with clipping or loss scaling.
    pub fn grad_norm(&self) -> Option<f32> {
        self.known(sys::DSOPT_REPORT_GRAD_NORM)
    }

    /// Norm of the weights before the step, if the optimizer reports norms.
    pub fn weight_norm(&self) -> Option<f32> {
        self.known(sys::DSOPT_REPORT_WEIGHT_NORM)
    }

    /// Norm of the change, if the optimizer reports norms.
    pub fn update_norm(&self) -> Option<f32> {
        self.known(sys::DSOPT_REPORT_UPDATE_NORM)
    }

    /// Norm of the experts' gradients.
    pub fn expert_norm(&self) -> Option<f32> {
        self.known(sys::DSOPT_REPORT_EXPERT_NORM)
    }

    /// Number of Inf and NaN found on this rank; 0 if not checked.
    pub fn nonfinite(&self) -> u64 {
        self.value(sys::DSOPT_REPORT_NONFINITE) as u64
    }

    /// The first parameter with an Inf or NaN.
    pub fn first_bad(&self) -> Option<usize> {
        Some(self.value(sys::DSOPT_REPORT_FIRST_BAD)).filter(|&index| index >= 0.0).map(|index| index as usize)
    }

    /// Divisor of the gradients; 0 if the step was skipped.
    pub fn divisor(&self) -> f32 {
        self.value(sys::DSOPT_REPORT_DIVISOR)
    }

    /// Loss scale of the gradients.
    pub fn scale_used(&self) -> f32 {
        self.value(sys::DSOPT_REPORT_SCALE_USED)
    }

    /// Loss scale for the next backward pass.
    pub fn scale_next(&self) -> f32 {
        self.value(sys::DSOPT_REPORT_SCALE_NEXT)
    }
}

/// Statistics of the steps so far: [`Optimizer::report`](crate::Optimizer::report).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Steps so far, skipped ones included.
    pub calls: i64,
    /// Skipped steps.
    pub skipped: i64,
    /// Steps skipped in a row up to now.
    pub skipped_in_row: i64,
    /// Inf and NaN found in the last step on this rank.
    pub nonfinite: i64,
    /// Index and name of the first parameter with an Inf or NaN in the last step.
    pub first_bad: Option<(usize, String)>,
    /// True if the last step was skipped.
    pub last_skipped: bool,
    /// Reasons for skipping it.
    pub reasons: SkipReasons,
    /// Loss scale for the next backward pass; 1 without a scaler.
    pub loss_scale: f64,
    /// Loss scale of the last step's gradients.
    pub scale_used: f64,
    /// Of the last step; NaN if not computed.
    pub grad_norm: f64,
    /// Of the last step; NaN if not computed.
    pub weight_norm: f64,
    /// Of the last step; NaN if not computed.
    pub update_norm: f64,
    /// Part of `grad_norm`.
    pub dense_norm: f64,
    /// Part of `grad_norm`.
    pub expert_norm: f64,
    /// Divisor of the last step's gradients.
    pub divisor: f64,
    /// Milliseconds of the last step's phases, `enum dsopt_phase`, if the optimizer has timing.
    pub ms: [f64; 8],
    /// Memory of the state.
    pub state_bytes: i64,
    /// Memory of the workspace.
    pub workspace_bytes: i64,
    /// Number of ranks that saved the last loaded checkpoint, if it differs from the present number; else 0.
    pub resharded_from: i32,
}

impl Report {
    /// # Safety
    /// The name is NULL or a string.
    pub(crate) unsafe fn new(raw: &sys::dsopt_report) -> Report {
        let name = || {
            if raw.first_bad_name.is_null() {
                return String::new();
            }
            // SAFETY: promised by the caller.
            unsafe { CStr::from_ptr(raw.first_bad_name) }.to_string_lossy().into_owned()
        };
        Report {
            calls: raw.calls,
            skipped: raw.skipped,
            skipped_in_row: raw.skipped_in_row,
            nonfinite: raw.nonfinite,
            first_bad: usize::try_from(raw.first_bad).ok().map(|index| (index, name())),
            last_skipped: raw.last_skipped != 0,
            reasons: SkipReasons(raw.reasons),
            loss_scale: raw.loss_scale,
            scale_used: raw.scale_used,
            grad_norm: raw.grad_norm,
            weight_norm: raw.weight_norm,
            update_norm: raw.update_norm,
            dense_norm: raw.dense_norm,
            expert_norm: raw.expert_norm,
            divisor: raw.divisor,
            ms: raw.ms,
            state_bytes: raw.state_bytes,
            workspace_bytes: raw.workspace_bytes,
            resharded_from: raw.resharded_from,
        }
    }
}
