// SPDX-License-Identifier: Apache-2.0
use crate::builder::{Comms, OptimizerBuilder};
use crate::error::{check, count, owned};
use crate::group::{self, RawParams};
use crate::lock::Guard;
use crate::tensor::list;
use crate::{panics, sys, Comm, Context, Error, Group, Op, Param, Report, Result, Scaler, TensorMut, TensorRef};
use std::cell::Cell;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// One handle, destroyed when it is dropped, and the objects that it needs.
#[derive(Debug)]
pub(crate) struct Handle {
    pointer: NonNull<sys::dsopt_optimizer>,
    pub context: Context,
    pub scaler: Option<Scaler>,
}

// SAFETY: a handle may be used and destroyed by any thread. Optimizer and Applier prevent conflicting concurrent calls.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub fn as_ptr(&self) -> *mut sys::dsopt_optimizer {
        self.pointer.as_ptr()
    }

    /// One more handle to the same optimizer.
    pub fn retain(&self) -> Result<Handle> {
        let mut other = ptr::null_mut();
        // SAFETY: the handle lives; any thread may retain it.
        let status = unsafe { sys::dsopt_optimizer_retain(self.as_ptr(), &mut other) };
        let (context, scaler) = (self.context.clone(), self.scaler.clone());
        owned(status, NonNull::new(other).map(|pointer| Handle { pointer, context, scaler }))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and this is its last use. Scaler and context are dropped after it.
        panics::discard(|| unsafe { sys::dsopt_optimizer_destroy(self.as_ptr()) });
    }
}

/// Groups, parameters and their state.
///
/// Parameters and gradients are lists of slices, one per parameter in the order of registration, and borrowed for each
/// call: the optimizer keeps no pointer to them.
///
/// An optimizer can move to another thread. It cannot be shared; [`Optimizer::applier`] can.
///
/// ```
/// use dsopt::{AdamW, Context, Dtype, Optimizer, Param};
///
/// let ctx = Context::cpu()?;
/// let mut opt = Optimizer::new(&ctx)?;
/// opt.add_group(&AdamW { lr: 0.1, weight_decay: 0.0, ..Default::default() }, &[Param::new("w", Dtype::F32, 3)])?;
/// let (mut w, g) = (vec![1.0f32; 3], vec![0.5f32, 0.0, -0.5]);
/// opt.step(&mut [(&mut w).into()], &[(&g).into()])?;
/// assert!(w[0] < 1.0 && w[1] == 1.0 && w[2] > 1.0);
/// # Ok::<(), dsopt::Error>(())
/// ```
///
/// Memory that is borrowed elsewhere cannot be stepped:
///
/// ```compile_fail,E0502
/// # use dsopt::{AdamW, Context, Dtype, Optimizer, Param};
/// # let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
/// # let (mut w, mut g) = (vec![1.0f32; 3], vec![0.5f32; 3]);
/// let backward = &mut g; // another borrow of the gradients that is still in use
/// opt.step(&mut [(&mut w).into()], &[(&g).into()]);
/// backward[0] = 0.0;
/// ```
///
/// ```compile_fail,E0502
/// # use dsopt::{AdamW, Context, Dtype, Optimizer, Param};
/// # let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
/// # let mut w = vec![1.0f32; 3];
/// opt.step(&mut [(&mut w).into()], &[(&w).into()]); // parameters are no gradients
/// ```
///
/// Threads cannot share it:
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>() {}
/// shared::<dsopt::Optimizer>();
/// ```
///
/// ```
/// fn moves<T: Send>() {}
/// moves::<dsopt::Optimizer>();
/// ```
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) handle: Handle,
    /// After the handle, so that they are dropped after it.
    comms: Comms,
    deepspeed: bool,
    pub(crate) averages: bool,
    /// True while a call through `&self` uses the comms. The `Cell` also makes the optimizer !Sync.
    busy: Cell<bool>,
    /// Counts the optimizer and its appliers.
    appliers: Arc<()>,
}

/// An optimizer as a constant, for any number of threads: [`Applier::apply`] changes only its arguments.
///
/// While a call of an applier runs, calls that change the optimizer itself fail with
/// [`ErrorKind::Busy`](crate::ErrorKind::Busy), and the other way round. Parameters cannot be added before the last
/// applier is dropped. An applier keeps the optimizer alive.
///
/// ```
/// fn shared<T: Send + Sync + Clone>() {}
/// shared::<dsopt::Applier>();
/// ```
#[derive(Clone, Debug)]
pub struct Applier {
    pub(crate) handle: Arc<Handle>,
    _alive: Arc<()>,
}

/// A hyper-parameter that can be read and set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields of groups
pub enum Key {
    Lr = 1,
    Beta1 = 2,
    Beta2 = 3,
    Eps = 4,
    WeightDecay = 5,
    GroupMaxNorm = 6,
    MinTrust = 7,
    MaxTrust = 8,
    /// 0 or 1.
    BiasCorrection = 9,
    /// 0 or 1.
    EpsInsideSqrt = 10,
    /// Only for all groups at once.
    FreezeStep = 12,
    /// 0 or 1.
    EpsUncorrected = 13,
    Momentum = 14,
    Dampening = 15,
    /// 0 or 1.
    Nesterov = 16,
    LrDecay = 17,
    InitialAccumulatorValue = 18,
    NsSteps = 19,
    NsA = 20,
    NsB = 21,
    NsC = 22,
    /// A constant of `enum dsopt_adjust`, the number of an [`Adjust`](crate::Adjust).
    Adjust = 23,
    /// A constant of `enum dsopt_ns`. A preset sets the coefficients to 0, `DSOPT_NS_CONSTANT` to their defaults.
    NsSchedule = 24,
    /// Only read: a constant of `enum dsopt_dtype`, the number of a [`Dtype`](crate::Dtype).
    NsDtype = 25,
    /// Of the optimizer.
    MaxNorm = 32,
    /// Of the optimizer: number of steps so far.
    Calls = 33,
    /// Of the optimizer.
    MaxValue = 34,
    /// Of the optimizer. Setting it resets the count of consecutive skips.
    SkipBudget = 35,
}

/// Reduction of gradients before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// They must be averaged over the data-parallel ranks.
    Full,
    /// Leave them local: the step exchanges one bit per element.
    Compressed,
    /// Leave them local: the step sends nothing.
    Local,
}

impl Reduction {
    pub(crate) fn of(reduction: i32) -> Result<Reduction> {
        match reduction {
            sys::DSOPT_REDUCTION_FULL => Ok(Reduction::Full),
            sys::DSOPT_REDUCTION_COMPRESSED => Ok(Reduction::Compressed),
            sys::DSOPT_REDUCTION_LOCAL => Ok(Reduction::Local),
            other => Err(Error::new(sys::DSOPT_ERR_VERSION, format!("reduction {other} is unknown to this crate"))),
        }
    }
}

/// State that [`Optimizer::reset`] resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reset {
    /// Masters, copied from the parameters.
    Masters = 1,
    /// Moments.
    Moments = 2,
    /// Counters.
    Counters = 4,
    /// Gradient accumulators.
    Grads = 8,
    /// Error feedback of the 1-bit family.
    Errors = 16,
}

/// Number of groups and of parameters.
pub(crate) fn counts(opt: *const sys::dsopt_optimizer) -> Result<(usize, usize)> {
    let (mut groups, mut params) = (0, 0);
    // SAFETY: the caller's handle lives.
    check(unsafe { sys::dsopt_optimizer_count(opt, &mut groups, &mut params) })?;
    Ok((usize::try_from(groups).unwrap_or(0), usize::try_from(params).unwrap_or(0)))
}

/// Held by a call through `&self`; see `Optimizer::busy`.
pub(crate) struct Busy<'a>(Option<&'a Cell<bool>>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if let Some(busy) = self.0 {
            busy.set(false);
        }
    }
}

impl Optimizer {
    /// An optimizer with every default, without groups.
    pub fn new(context: &Context) -> Result<Optimizer> {
        Optimizer::builder(context).build()
    }

    /// An optimizer with options.
    pub fn builder(context: &Context) -> OptimizerBuilder {
        OptimizerBuilder::new(context)
    }

    pub(crate) fn own(
        pointer: NonNull<sys::dsopt_optimizer>,
        context: Context,
        scaler: Option<Scaler>,
        comms: Comms,
        deepspeed: bool,
        averages: bool,
    ) -> Optimizer {
        let handle = Handle { pointer, context, scaler };
        Optimizer { handle, comms, deepspeed, averages, busy: Cell::new(false), appliers: Arc::new(()) }
    }

    /// The handle, for calls of `dsopt-sys`. It is valid as long as this optimizer.
    pub fn as_ptr(&self) -> *mut sys::dsopt_optimizer {
        self.handle.as_ptr()
    }

    /// The context with which it was made.
    pub fn context(&self) -> &Context {
        &self.handle.context
    }

    /// Locks the scaler, for calls that use it.
    pub(crate) fn enter(&self) -> Result<Option<Guard<'_>>> {
        self.handle.scaler.as_ref().map(Scaler::enter).transpose()
    }

    /// Marks the comms as busy, for calls through `&self`: a hook cannot make another call from inside.
    pub(crate) fn use_comms(&self) -> Result<Busy<'_>> {
        if self.comms.is_empty() {
            return Ok(Busy(None));
        }
        if self.busy.replace(true) {
            return Err(Error::new(sys::DSOPT_ERR_BUSY, "the comms are in use by the call that runs this hook"));
        }
        Ok(Busy(Some(&self.busy)))
    }

    /// A constant view for other threads. Not with comms, which one thread at a time may use.
    pub fn applier(&self) -> Result<Applier> {
        if !self.comms.is_empty() {
            let text = "an applier of an optimizer with comms: several threads could be in one comm";
            return Err(Error::new(sys::DSOPT_ERR_UNSUPPORTED, text));
        }
        Ok(Applier { handle: Arc::new(self.handle.retain()?), _alive: self.appliers.clone() })
    }

    /// Refuses if there is an applier: the lengths of its lists are checked before its call, so the number of
    /// parameters must not grow meanwhile. Only `&self` makes the first applier, so none can appear here.
    fn no_applier(&self) -> Result<()> {
        if Arc::strong_count(&self.appliers) > 1 {
            let text = "parameters cannot be added while the optimizer has an applier: drop it before";
            return Err(Error::new(sys::DSOPT_ERR_STATE, text));
        }
        Ok(())
    }

    /// Append a group and its parameters. May be called between steps; lists are longer afterwards.
    pub fn add_group(&mut self, group: &dyn Group, params: &[Param]) -> Result<()> {
        self.no_applier()?;
        let group = group::raw(group)?;
        let params = RawParams::new(params)?;
        let _inside = self.enter()?;
        // SAFETY: group, list, names and dims outlive the call, and are copied by it.
        let status = unsafe {
            sys::dsopt_optimizer_add_group(self.as_ptr(), &group, params.list.as_ptr(), count(params.list.len()))
        };
        check(status)
    }

    /// Append parameters to the groups that [`Param::group`] names.
    pub fn add_params(&mut self, params: &[Param]) -> Result<()> {
        self.no_applier()?;
        let params = RawParams::new(params)?;
        let _inside = self.enter()?;
        // SAFETY: list, names and dims outlive the call, and are copied by it.
        let status =
            unsafe { sys::dsopt_optimizer_add_params(self.as_ptr(), params.list.as_ptr(), count(params.list.len())) };
        check(status)
    }

    /// Number of groups.
    pub fn groups(&self) -> Result<usize> {
        Ok(counts(self.as_ptr())?.0)
    }

    /// Number of parameters.
    pub fn params(&self) -> Result<usize> {
        Ok(counts(self.as_ptr())?.1)
    }

    /// Set a hyper-parameter of a group, or with `None` of every group or of the optimizer, from the next step on.
    pub fn set(&mut self, group: Option<usize>, key: Key, value: f64) -> Result<()> {
        let group = group_index(group);
        let _inside = self.enter()?;
        // SAFETY: the handle lives.
        check(unsafe { sys::dsopt_optimizer_set(self.as_ptr(), group, key as i32, value) })
    }

    /// Set the learning rate of every group.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.set(None, Key::Lr, lr)
    }

    /// Read a hyper-parameter. `None` reads group 0, or the optimizer's.
    pub fn get(&self, group: Option<usize>, key: Key) -> Result<f64> {
        let mut value = 0.0;
        // SAFETY: the handle lives.
        check(unsafe { sys::dsopt_optimizer_get(self.as_ptr(), group_index(group), key as i32, &mut value) })?;
        Ok(value)
    }

    /// Add gradients to the accumulators, for a later [`Step::accumulated`](crate::Step::accumulated).
    pub fn accumulate(&mut self, grads: &[TensorRef<'_>]) -> Result<()> {
        let _inside = self.enter()?;
        // SAFETY: the list is borrowed for the call, and only read.
        let status =
            unsafe { sys::dsopt_optimizer_accumulate(self.as_ptr(), list(grads), count(grads.len()), ptr::null_mut()) };
        check(status)
    }

    /// Reduction of the gradients of the next step, known before the backward pass.
    pub fn next_reduction(&mut self) -> Result<Reduction> {
        self.reduction_of_call(0)
    }

    /// Reduction of the gradients of step number `call`, counted from 1.
    pub fn reduction_at(&self, call: u32) -> Result<Reduction> {
        self.reduction_of_call(i64::from(call.max(1)))
    }

    fn reduction_of_call(&self, call: i64) -> Result<Reduction> {
        let mut reduction = 0;
        // SAFETY: the handle lives.
        check(unsafe { sys::dsopt_optimizer_next_reduction(self.as_ptr(), call, &mut reduction) })?;
        Reduction::of(reduction)
    }

    /// The functional form: reduction of the next [`Optimizer::apply`] with this state tensor "schedule". `None`
    /// without the 1-bit family.
    pub fn reduction_of(&self, schedule: Option<&[i32; 8]>) -> Result<Reduction> {
        reduction_of(&self.handle, schedule)
    }

    /// All-reduce a list, such as the gradients, over the data-parallel ranks.
    pub fn all_reduce(&mut self, tensors: &mut [TensorMut<'_>], op: Op) -> Result<()> {
        match &mut self.comms.data {
            Some(comm) => comm.all_reduce(tensors, op),
            None => Err(Error::new(sys::DSOPT_ERR_STATE, "all_reduce: the optimizer was built without a data comm")),
        }
    }

    /// The data-parallel comm's handle, to query or abort it.
    pub fn data_comm(&self) -> Option<crate::CommHandle> {
        self.comms.data.as_ref().map(Comm::handle)
    }

    /// The elements of a parameter whose state a data-parallel rank keeps: empty if there are none, and without
    /// [`shard`](OptimizerBuilder::shard) all of them. They change when parameters are added. `rank` is the rank in
    /// `data` + ranks of `data` * rank in `node`; `None` is this rank.
    pub fn shard(&self, param: usize, rank: Option<usize>) -> Result<Range<usize>> {
        let rank = rank.map_or(-1, |rank| i32::try_from(rank).unwrap_or(i32::MAX));
        let (mut begin, mut numel) = (0, 0);
        // SAFETY: the handle lives, and the results are written only on success.
        check(unsafe { sys::dsopt_optimizer_shard(self.as_ptr(), count(param), rank, &mut begin, &mut numel) })?;
        let begin = usize::try_from(begin).unwrap_or(0);
        Ok(begin..begin + usize::try_from(numel).unwrap_or(0))
    }

    /// Statistics of the steps so far. On CUDA it waits for earlier calls.
    pub fn report(&mut self) -> Result<Report> {
        let _inside = self.enter()?;
        let mut report = sys::zeroed!(dsopt_report);
        // SAFETY: the handle lives, and the struct's size is set.
        check(unsafe { sys::dsopt_optimizer_report(self.as_ptr(), &mut report) })?;
        // SAFETY: the name is NULL, or owned by the optimizer, which is borrowed.
        Ok(unsafe { Report::new(&report) })
    }

    /// Reset parts of the state to their initial values. `params` is needed for masters, and may be empty without them.
    pub fn reset(&mut self, what: &[Reset], params: &[TensorRef<'_>]) -> Result<()> {
        let bits = what.iter().fold(0, |bits, &part| bits | part as i32);
        self.with_params(params, |opt| {
            // SAFETY: the handle lives, and the bound parameters are borrowed.
            check(unsafe { sys::dsopt_optimizer_reset(opt, bits, ptr::null_mut()) })
        })
    }

    /// Create the state before the first step, with masters from `params`. For [`Optimizer::import`] and views of the
    /// state.
    ///
    /// Parameters are written to only in DeepSpeed's mode with masters, which executes a step on zero gradients first.
    pub fn init(&mut self, params: &mut [TensorMut<'_>]) -> Result<()> {
        let index = match self.state()?.iter().position(|entry| entry.numel > 0 && !entry.of_scaler()) {
            Some(index) => index,
            None => return Ok(()),
        };
        let size = self.state()?[index].bytes();
        let mut unused = vec![0u8; size];
        self.with_params_mut(params, |opt| {
            // SAFETY: `unused` has the size of the entry. The parameters are borrowed mutably.
            check(unsafe { sys::dsopt_optimizer_export(opt, count(index), unused.as_mut_ptr().cast(), size) })
        })
    }

    /// Refuses a call that may only read the parameters, but would create the state: in DeepSpeed's mode that executes
    /// a step on zero gradients, which decays fp32 parameters in place.
    pub(crate) fn only_reads(&self) -> Result<()> {
        if self.deepspeed {
            for index in 0..self.state_count()? {
                if self.raw_state(index)?.tensor.data.is_null() {
                    let text = "the state is not made yet, which changes parameters in DeepSpeed's mode: call init";
                    return Err(Error::new(sys::DSOPT_ERR_STATE, text));
                }
            }
        }
        Ok(())
    }

    /// Runs a call with the parameters bound for reading, or without binding if there are none.
    pub(crate) fn with_params<R>(
        &mut self,
        params: &[TensorRef<'_>],
        call: impl FnOnce(*mut sys::dsopt_optimizer) -> Result<R>,
    ) -> Result<R> {
        if !params.is_empty() {
            self.only_reads()?;
        }
        self.with_bound(params, call)
    }

    /// Runs a call with the parameters bound for writing.
    pub(crate) fn with_params_mut<R>(
        &mut self,
        params: &mut [TensorMut<'_>],
        call: impl FnOnce(*mut sys::dsopt_optimizer) -> Result<R>,
    ) -> Result<R> {
        let params: Vec<_> = params.iter_mut().map(|tensor| tensor.as_ref()).collect();
        self.with_bound(&params, call)
    }

    /// Runs a call with the parameters bound, and unbinds them after it, also on failure. Without parameters nothing is
    /// bound.
    fn with_bound<R>(
        &mut self,
        params: &[TensorRef<'_>],
        call: impl FnOnce(*mut sys::dsopt_optimizer) -> Result<R>,
    ) -> Result<R> {
        /// Unbinds, also when the call panics.
        struct Bound(*mut sys::dsopt_optimizer, Vec<sys::dsopt_tensor>);
        impl Drop for Bound {
            fn drop(&mut self) {
                let list = self.1.as_ptr();
                // A bound pointer could be used after the memory is freed. Unbinding allocates nothing, so only an
                // applier's call can prevent it. In a child of fork() no call that would use the memory succeeds.
                panics::discard(|| {
                    // SAFETY: the handle lives, and NULL is legal for every parameter.
                    while unsafe {
                        sys::dsopt_optimizer_bind(self.0, sys::DSOPT_BIND_PARAMS, list, count(self.1.len()))
                    } == sys::DSOPT_ERR_BUSY
                    {
                        std::thread::yield_now();
                    }
                });
            }
        }
        let _inside = self.enter()?;
        let opt = self.as_ptr();
        if params.is_empty() {
            return call(opt);
        }
        // SAFETY: a tensor in Rust is the struct of C.
        let raw = unsafe { std::slice::from_raw_parts(list(params), params.len()) };
        let nowhere = raw.iter().map(|tensor| sys::dsopt_tensor { data: ptr::null_mut(), ..*tensor }).collect();
        // SAFETY: the list is borrowed for longer than it is bound.
        let status =
            unsafe { sys::dsopt_optimizer_bind(opt, sys::DSOPT_BIND_PARAMS, list(params), count(params.len())) };
        // Created before anything can return or panic.
        let _bound = if status == sys::DSOPT_OK { Some(Bound(opt, nowhere)) } else { None };
        check(status)?;
        call(opt)
    }
}

impl Applier {
    /// Reduction of the gradients of the next [`Applier::apply`], from its state tensor "schedule".
    pub fn reduction_of(&self, schedule: Option<&[i32; 8]>) -> Result<Reduction> {
        reduction_of(&self.handle, schedule)
    }
}

fn reduction_of(handle: &Handle, schedule: Option<&[i32; 8]>) -> Result<Reduction> {
    handle.context.host_only("a schedule")?;
    let schedule = schedule.map(TensorRef::from);
    let tensor = schedule.as_ref().map_or(ptr::null(), |tensor| list(std::slice::from_ref(tensor)));
    let mut reduction = 0;
    // SAFETY: the handle lives, and the words are borrowed and only read.
    check(unsafe {
        sys::dsopt_optimizer_next_reduction_on_device(handle.as_ptr(), tensor, &mut reduction, ptr::null_mut())
    })?;
    Reduction::of(reduction)
}

fn group_index(group: Option<usize>) -> i32 {
    group.map_or(sys::DSOPT_ALL_GROUPS, |index| i32::try_from(index).unwrap_or(i32::MAX))
}
