// SPDX-License-Identifier: Apache-2.0
use crate::context::{run_pieces, Body, Pool};
use crate::error::{check, count};
use crate::optimizer::{counts, Applier, Optimizer};
use crate::tensor::{list, list_mut};
use crate::{panics, sys, Context, Error, Result, StepReport, TensorMut, TensorRef};
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::{ptr, slice};

/// Hyper-parameters of one group for one step. NaN means the value that is set, which is also more exact than an `f32`.
///
/// An invalid value skips the step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the mean of gradients.
    pub beta1: f32,
    /// Decay of the mean of squares.
    pub beta2: f32,
    /// Added to the root of the mean of squares.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Clip by this group's norm. Requires that a positive value is set.
    pub group_max_norm: f32,
    /// Clip by the norm of all gradients, of group 0 only. Requires that a positive value is set.
    pub max_norm: f32,
    /// Momentum of [`Sgd`](crate::Sgd) with momentum, above 0, and of [`Muon`](crate::Muon). NaN or 0 for the other groups.
    pub momentum: f32,
    /// Reserved for later versions: 0.
    #[doc(hidden)]
    pub reserved: [f32; sys::DSOPT_HYPER_FLOATS as usize - 8],
}

impl Default for Hyper {
    fn default() -> Hyper {
        let nan = f32::NAN;
        Hyper {
            lr: nan,
            beta1: nan,
            beta2: nan,
            eps: nan,
            weight_decay: nan,
            group_max_norm: nan,
            max_norm: nan,
            momentum: nan,
            reserved: [0.0; sys::DSOPT_HYPER_FLOATS as usize - 8],
        }
    }
}

/// Arguments of one step, for [`Optimizer::step_with`] and [`Applier::apply`].
///
/// ```
/// # use dsopt::{AdamW, Context, Dtype, Optimizer, Param, Step, StepReport};
/// # let ctx = Context::cpu()?;
/// # let mut opt = Optimizer::builder(&ctx).max_norm(1.0).build()?;
/// # opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::F32, 3)])?;
/// # let (mut w, mut g) = (vec![1.0f32; 3], vec![3.0f32, 0.0, 4.0]);
/// let mut report = StepReport::default();
/// // Gradients are sums of 4 micro-batches; they are zeroed in the same pass.
/// let (mut params, mut grads) = ([(&mut w).into()], [(&mut g).into()]);
/// opt.step_with(Step::zeroing(&mut params, &mut grads).grad_scale(4.0).report(&mut report))?;
/// assert_eq!(report.grad_norm(), Some(1.25));
/// assert_eq!(g, [0.0; 3]);
/// # Ok::<(), dsopt::Error>(())
/// ```
#[must_use = "a step is taken by Optimizer::step_with or Applier::apply"]
pub struct Step<'a> {
    raw: sys::dsopt_step,
    /// Name and length of the lists with one entry per parameter.
    lengths: [(&'static str, usize); 3],
    groups: [(&'static str, usize); 3],
    grad_scale: Option<f32>,
    skip: bool,
    pool: Option<&'a Pool<'a>>,
    host: bool,
    memory: PhantomData<&'a mut [u8]>,
}

impl fmt::Debug for Step<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Step").field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// An entry of `Step::lengths` or `Step::groups` without a list.
const NONE: (&str, usize) = ("", usize::MAX);

impl<'a> Step<'a> {
    fn over(params: *const sys::dsopt_tensor, length: usize) -> Step<'a> {
        let mut raw = sys::zeroed!(dsopt_step);
        raw.params = params;
        raw.count = count(length);
        Step {
            raw,
            lengths: [("parameters", length), NONE, NONE],
            groups: [NONE; 3],
            grad_scale: None,
            skip: false,
            pool: None,
            host: false,
            memory: PhantomData,
        }
    }

    fn grads(mut self, grads: *const sys::dsopt_tensor, length: usize) -> Step<'a> {
        self.raw.grads = grads;
        self.lengths[1] = ("gradients", length);
        self
    }

    /// Update parameters from gradients.
    pub fn new(params: &'a mut [TensorMut<'_>], grads: &'a [TensorRef<'_>]) -> Step<'a> {
        Step::over(list_mut(params), params.len()).grads(list(grads), grads.len())
    }

    /// As [`Step::new`], and set the gradients to zero in the same pass, also when the step is skipped.
    pub fn zeroing(params: &'a mut [TensorMut<'_>], grads: &'a mut [TensorMut<'_>]) -> Step<'a> {
        let mut step = Step::over(list_mut(params), params.len()).grads(list_mut(grads), grads.len());
        step.raw.flags |= sys::DSOPT_STEP_ZERO_GRADS;
        step
    }

    /// The gradients are the sums of [`Optimizer::accumulate`] since the last such step.
    pub fn accumulated(params: &'a mut [TensorMut<'_>]) -> Step<'a> {
        let mut step = Step::over(list_mut(params), params.len());
        step.raw.flags |= sys::DSOPT_STEP_ACCUMULATED;
        step
    }

    /// Do not change the parameters, and write the new ones to `out`.
    pub fn out_only(params: &'a [TensorRef<'_>], grads: &'a [TensorRef<'_>], out: &'a mut [TensorMut<'_>]) -> Step<'a> {
        let mut step = Step::over(list(params), params.len()).grads(list(grads), grads.len()).out(out);
        step.raw.flags |= sys::DSOPT_STEP_OUT_ONLY;
        step
    }

    /// Do not change the parameters, and write new minus old to `out`.
    pub fn delta(params: &'a [TensorRef<'_>], grads: &'a [TensorRef<'_>], out: &'a mut [TensorMut<'_>]) -> Step<'a> {
        let mut step = Step::over(list(params), params.len()).grads(list(grads), grads.len()).out(out);
        step.raw.flags |= sys::DSOPT_STEP_DELTA;
        step
    }

    /// Write the new parameters here as well, rounded to the dtype of each entry.
    pub fn out(mut self, out: &'a mut [TensorMut<'_>]) -> Step<'a> {
        self.raw.out = list_mut(out);
        self.lengths[2] = ("outputs", out.len());
        self
    }

    /// Learning rates of this step, one per group.
    pub fn lr(mut self, lr: &'a [f32]) -> Step<'a> {
        self.raw.lr = lr.as_ptr();
        self.groups[0] = ("learning rates", lr.len());
        self.host = true;
        self
    }

    /// Hyper-parameters of this step, one row per group.
    pub fn hyper(mut self, rows: &'a [Hyper]) -> Step<'a> {
        self.raw.hyper = rows.as_ptr().cast();
        self.groups[1] = ("rows of hyper-parameters", rows.len());
        self.host = true;
        self
    }

    /// L2 norms of the gradients as passed, one per group, which saves reading the gradients for the norms.
    pub fn grad_norms(mut self, norms: &'a [f32]) -> Step<'a> {
        self.raw.grad_norms = norms.as_ptr();
        self.groups[2] = ("gradient norms", norms.len());
        self.host = true;
        self
    }

    /// Additional factor by which the gradients are scaled; they are divided by it and by the loss scale.
    pub fn grad_scale(mut self, scale: f32) -> Step<'a> {
        self.grad_scale = Some(scale);
        self.host = true;
        self
    }

    /// Skip the step, as if the gradients had overflown.
    pub fn skip(mut self, skip: bool) -> Step<'a> {
        self.skip = skip;
        self.host |= skip;
        self
    }

    /// Receives the report of the step.
    pub fn report(mut self, report: &'a mut StepReport) -> Step<'a> {
        self.raw.report = report.values.as_mut_ptr();
        self.host = true;
        self
    }

    /// The report has no NaN, for tools that stop at any NaN: values that were not computed are -1 in [`Step::as_raw`],
    /// and still `None` in a [`StepReport`].
    pub fn no_nan(mut self) -> Step<'a> {
        self.raw.flags |= sys::DSOPT_STEP_NO_NAN;
        self
    }

    /// A thread pool for this step, as in [`ContextBuilder::parallel_for`](crate::ContextBuilder::parallel_for).
    pub fn parallel_for(mut self, pool: &'a Pool<'a>) -> Step<'a> {
        self.pool = Some(pool);
        self
    }

    /// The struct of C, to set fields that this type does not set: a CUDA stream, or values in device memory.
    ///
    /// # Safety
    /// The fields must satisfy the requirements of `dsopt.h` for the following call.
    pub unsafe fn as_raw(&mut self) -> &mut sys::dsopt_step {
        &mut self.raw
    }

    /// Returns the gradients with the size and dtype of the parameter for those that are absent: they say what the other
    /// ranks send. `None` if there are none. The lists have this length.
    fn filled(&self, length: usize) -> Option<Vec<sys::dsopt_tensor>> {
        if self.raw.grads.is_null() || length == 0 {
            return None;
        }
        let absent = |grad: &sys::dsopt_tensor| grad.data.is_null() && grad.numel == 0;
        // SAFETY: lists of this length, borrowed for 'a.
        let (grads, params) =
            unsafe { (slice::from_raw_parts(self.raw.grads, length), slice::from_raw_parts(self.raw.params, length)) };
        if !grads.iter().any(absent) {
            return None;
        }
        let fill = |(grad, param): (&sys::dsopt_tensor, &sys::dsopt_tensor)| {
            if absent(grad) {
                sys::dsopt_tensor { data: ptr::null_mut(), ..*param }
            } else {
                *grad
            }
        };
        Some(grads.iter().zip(params).map(fill).collect())
    }

    /// Checks lengths that the library does not receive, and makes the call.
    fn run(
        mut self,
        context: &Context,
        opt: *const sys::dsopt_optimizer,
        averages: bool,
        call: impl FnOnce(&sys::dsopt_step) -> sys::dsopt_status,
    ) -> Result<()> {
        let length = self.lengths[0].1;
        for &(what, found) in &self.lengths[1..] {
            if found != length && found != usize::MAX {
                let text = format!("the list of {what} has {found} tensors, that of parameters {length}");
                return Err(Error::new(sys::DSOPT_ERR_SHAPE, text));
            }
        }
        if self.host {
            context.host_only("a value of this step")?;
            if self.groups.iter().any(|&(_, found)| found != usize::MAX) {
                let (groups, _) = counts(opt)?;
                for &(what, found) in &self.groups {
                    if found != groups && found != usize::MAX {
                        let text = format!("the step has {found} {what}, the optimizer {groups} groups");
                        return Err(Error::new(sys::DSOPT_ERR_SHAPE, text));
                    }
                }
            }
        }
        let filled = if averages { self.filled(length) } else { None };
        if let Some(grads) = &filled {
            self.raw.grads = grads.as_ptr();
        }
        let skip = 1;
        if self.skip {
            self.raw.skip = &skip;
        }
        if let Some(scale) = &self.grad_scale {
            self.raw.grad_scale = scale;
        }
        if let Some(pool) = &self.pool {
            self.raw.parallel_for = Some(parallel_for);
            self.raw.parallel_user = pool as *const &Pool<'_> as *mut c_void;
        }
        check(call(&self.raw))
    }
}

unsafe extern "C" fn parallel_for(user: *mut c_void, n: i64, body: Body, arg: *mut c_void) {
    panics::catch((), || {
        // SAFETY: `user` points to the reference in the running step.
        let pool: &Pool<'_> = unsafe { *user.cast::<&Pool<'_>>() };
        run_pieces(pool, n, body, arg);
    })
}

impl Optimizer {
    /// Update every parameter that has a gradient, once. Lists have one tensor per parameter.
    #[inline]
    pub fn step(&mut self, params: &mut [TensorMut<'_>], grads: &[TensorRef<'_>]) -> Result<()> {
        self.step_with(Step::new(params, grads))
    }

    /// A step with options.
    pub fn step_with(&mut self, step: Step<'_>) -> Result<()> {
        if step.raw.flags & (sys::DSOPT_STEP_OUT_ONLY | sys::DSOPT_STEP_DELTA) != 0 {
            self.only_reads()?;
        }
        let _inside = self.enter()?;
        let opt = self.as_ptr();
        // SAFETY: the lists have the lengths that the library expects, and their tensors are borrowed for this call.
        step.run(self.context(), opt, self.averages, |raw| unsafe { sys::dsopt_optimizer_step(opt, raw) })
    }

    /// A step as a pure function: reads and writes only its arguments. See [`Applier::apply`].
    pub fn apply(&self, step: Step<'_>, state: &mut [TensorMut<'_>], workspace: &mut Vec<u8>) -> Result<()> {
        let _busy = self.use_comms()?;
        apply(self.context(), self.as_ptr(), self.averages, step, state, workspace)
    }
}

impl Applier {
    /// A step as a pure function: reads and writes only its arguments.
    ///
    /// `state` has every entry of [`Optimizer::state`], in that order, with the values of
    /// [`init_state`](Optimizer::init_state) or of an earlier call. The workspace grows as needed, and holds no state.
    pub fn apply(&self, step: Step<'_>, state: &mut [TensorMut<'_>], workspace: &mut Vec<u8>) -> Result<()> {
        let averages = false; // it has no comms
        apply(&self.handle.context, self.handle.as_ptr(), averages, step, state, workspace)
    }
}

fn apply(
    context: &Context,
    opt: *const sys::dsopt_optimizer,
    averages: bool,
    mut step: Step<'_>,
    state: &mut [TensorMut<'_>],
    workspace: &mut Vec<u8>,
) -> Result<()> {
    context.host_only("the workspace")?;
    let mut bytes = 0;
    // SAFETY: the caller's handle lives.
    check(unsafe { sys::dsopt_optimizer_workspace(opt, &mut bytes) })?;
    if workspace.len() < bytes {
        workspace.resize(bytes, 0);
    }
    step.raw.state = list_mut(state);
    step.raw.state_count = count(state.len());
    step.raw.workspace = if workspace.is_empty() { ptr::null_mut() } else { workspace.as_mut_ptr().cast() };
    step.raw.workspace_bytes = workspace.len();
    // SAFETY: as in step_with; state and workspace are borrowed mutably.
    step.run(context, opt, averages, |raw| unsafe { sys::dsopt_optimizer_apply(opt, raw) })
}
