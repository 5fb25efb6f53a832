// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, count};
use crate::optimizer::{Applier, Optimizer, Reduction};
use crate::tensor::list_mut;
use crate::{sys, Array, Dtype, Element, Error, Result, TensorMut, TensorRef, BF16, F16, F8E4M3};
use std::ffi::CStr;
use std::mem::size_of_val;
use std::{ptr, slice};

/// One entry of the state, which is everything that a step changes apart from the parameters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateInfo {
    /// "exp_avg", "step" and so on, as `dsopt.h` lists them.
    pub name: &'static str,
    /// Index of the parameter that it belongs to. `None`: the whole optimizer.
    pub param: Option<usize>,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Number of elements.
    pub numel: usize,
    /// Its shape: the parameter's, or one dimension: of the whole optimizer, scales and sharded entries.
    pub dims: Vec<usize>,
    /// Number of elements of the parameter per element: 256 for scales, 1 for other entries of a parameter, 0: of the
    /// whole optimizer.
    pub block: usize,
    /// It is initially a copy of the parameter.
    pub from_param: bool,
    /// It differs between data-parallel ranks.
    pub rank_local: bool,
    /// It is the part of its parameter that this rank keeps, see [`Optimizer::shard`].
    pub sharded: bool,
}

impl StateInfo {
    pub(crate) fn bytes(&self) -> usize {
        self.numel * self.dtype.size()
    }

    /// True for the scaler's memory, which other optimizers and the scaler's handles use too.
    pub(crate) fn of_scaler(&self) -> bool {
        self.param.is_none() && matches!(self.name, "loss_scale" | "scaler")
    }
}

/// State in place, borrowed from its optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum View<'a> {
    /// Of `f32`.
    F32(&'a [f32]),
    /// Of [`struct@F16`].
    F16(&'a [F16]),
    /// Of [`struct@BF16`].
    BF16(&'a [BF16]),
    /// Of `i32`.
    I32(&'a [i32]),
    /// Of `i16`.
    I16(&'a [i16]),
    /// Of `u8`.
    U8(&'a [u8]),
    /// Of [`struct@F8E4M3`].
    F8E4M3(&'a [F8E4M3]),
}

impl<'a> View<'a> {
    /// The elements, if that is their type.
    pub fn as_f32(self) -> Option<&'a [f32]> {
        match self {
            View::F32(values) => Some(values),
            _ => None,
        }
    }

    /// The elements, if that is their type.
    pub fn as_i32(self) -> Option<&'a [i32]> {
        match self {
            View::I32(values) => Some(values),
            _ => None,
        }
    }
}

/// The schedule of the 1-bit family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Schedule {
    /// Steps so far.
    pub step: i32,
    /// True once the variance is frozen.
    pub frozen: bool,
    /// 0/1 Adam: interval of variance steps, 0 = not started.
    pub var_interval: i32,
    /// 0/1 Adam: number of variance steps at this interval.
    pub var_counter: i32,
    /// 0/1 Adam: interval of exchanges after the freeze, 0 = not started.
    pub local_interval: i32,
    /// 0/1 Adam: number of steps at this interval.
    pub local_counter: i32,
    /// "exp_avg_bits" has the momentum in place of "exp_avg".
    pub momentum_in_bits: bool,
    /// Reduction of the next step.
    pub reduction: Reduction,
}

impl Optimizer {
    pub(crate) fn raw_state(&self, index: usize) -> Result<sys::dsopt_state_info> {
        let mut info = sys::zeroed!(dsopt_state_info);
        // SAFETY: the handle lives, and the struct's size is set. The library refuses an index out of range.
        check(unsafe { sys::dsopt_optimizer_state(self.as_ptr(), count(index), &mut info) })?;
        Ok(info)
    }

    /// The entries of the state, in the order of every state list. It follows from the groups, before the first step
    /// too.
    pub fn state(&self) -> Result<Vec<StateInfo>> {
        (0..self.state_count()?).map(|index| self.state_info(index)).collect()
    }

    pub(crate) fn state_count(&self) -> Result<usize> {
        let mut length = 0;
        // SAFETY: the handle lives.
        check(unsafe { sys::dsopt_optimizer_state_count(self.as_ptr(), &mut length) })?;
        Ok(usize::try_from(length).unwrap_or(0))
    }

    /// One entry of the state.
    pub fn state_info(&self, index: usize) -> Result<StateInfo> {
        let raw = self.raw_state(index)?;
        // SAFETY: names are static strings.
        let name = unsafe { CStr::from_ptr::<'static>(raw.name) };
        let dims = match usize::try_from(raw.ndim) {
            // SAFETY: `dims` has `ndim` numbers, valid until parameters are added, which needs `&mut self`.
            Ok(ndim) if ndim > 0 && !raw.dims.is_null() => unsafe { slice::from_raw_parts(raw.dims, ndim) },
            _ => &[],
        };
        let name = name.to_str().map_err(|_| Error::new(sys::DSOPT_ERR_INTERNAL, "a state has no name in UTF-8"))?;
        Ok(StateInfo {
            name,
            param: usize::try_from(raw.param).ok(),
            dtype: dtype_of(&raw)?,
            numel: usize::try_from(raw.tensor.numel).unwrap_or(0),
            dims: dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect(),
            block: usize::try_from(raw.block).unwrap_or(0),
            from_param: raw.flags & sys::DSOPT_STATE_FROM_PARAM != 0,
            rank_local: raw.flags & sys::DSOPT_STATE_RANK_LOCAL != 0,
            sharded: raw.flags & sys::DSOPT_STATE_SHARDED != 0,
        })
    }

    /// Index of the entry of this name of a parameter, or with `None` of the whole optimizer.
    pub fn find_state(&self, name: &str, param: Option<usize>) -> Result<Option<usize>> {
        Ok(self.state()?.iter().position(|entry| entry.name == name && entry.param == param))
    }

    /// An entry in place. `None` before the first step, before [`Optimizer::init`], and on a device.
    ///
    /// ```compile_fail,E0502
    /// # use dsopt::{AdamW, Context, Dtype, Optimizer, Param};
    /// # let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
    /// # let (mut w, g) = (vec![1.0f32; 3], vec![0.5f32; 3]);
    /// let view = opt.view(0);
    /// opt.step(&mut [(&mut w).into()], &[(&g).into()]); // would change the viewed memory
    /// println!("{view:?}");
    /// ```
    pub fn view(&self, index: usize) -> Result<Option<View<'_>>> {
        let info = self.state_info(index)?;
        if info.of_scaler() {
            let text = format!("state '{}' is the scaler's own memory: query the scaler, or export it", info.name);
            return Err(Error::new(sys::DSOPT_ERR_UNSUPPORTED, text));
        }
        let tensor = self.raw_state(index)?.tensor;
        if self.context().is_cuda() || (tensor.data.is_null() && info.numel != 0) {
            return Ok(None);
        }
        // SAFETY: memory of the engine with `numel` elements of this type. Functions that change or free it need `&mut
        // self`; calls of an applier do not access it.
        Ok(Some(unsafe {
            match info.dtype {
                Dtype::F32 => View::F32(elements(&tensor)),
                Dtype::F16 => View::F16(elements(&tensor)),
                Dtype::BF16 => View::BF16(elements(&tensor)),
                Dtype::I32 => View::I32(elements(&tensor)),
                Dtype::I16 => View::I16(elements(&tensor)),
                Dtype::U8 => View::U8(elements(&tensor)),
                Dtype::F8E4M3 => View::F8E4M3(elements(&tensor)),
            }
        }))
    }

    fn check_copy<T: Element>(&self, index: usize) -> Result<()> {
        let info = self.state_info(index)?;
        if info.dtype == T::DTYPE {
            return Ok(());
        }
        let text = format!("state '{}' has dtype {:?}, the slice {:?}", info.name, info.dtype, T::DTYPE);
        Err(Error::new(sys::DSOPT_ERR_DTYPE, text))
    }

    /// Copy an entry of the state. Before the first step see [`Optimizer::init`].
    pub fn export<T: Element>(&mut self, index: usize, to: &mut [T]) -> Result<()> {
        self.check_copy::<T>(index)?;
        let _inside = self.enter()?;
        let bytes = size_of_val(to);
        // SAFETY: `to` has `bytes` bytes; all bit patterns are valid elements.
        check(unsafe { sys::dsopt_optimizer_export(self.as_ptr(), count(index), to.as_mut_ptr().cast(), bytes) })
    }

    /// Set an entry of the state. Before the first step see [`Optimizer::init`].
    pub fn import<T: Element>(&mut self, index: usize, from: &[T]) -> Result<()> {
        self.check_copy::<T>(index)?;
        let _inside = self.enter()?;
        let bytes = size_of_val(from);
        // SAFETY: `from` has `bytes` bytes.
        check(unsafe { sys::dsopt_optimizer_import(self.as_ptr(), count(index), from.as_ptr().cast(), bytes) })
    }

    /// Copy a moment as `f32`, whatever its format, or the master of which "remainder" is a part. Other `f32` entries
    /// are copied as they are. `params` is needed for remainders, and may be empty otherwise.
    pub fn export_f32(&mut self, index: usize, to: &mut [f32], params: &[TensorRef<'_>]) -> Result<()> {
        let (host, length) = (to.as_mut_ptr(), count(to.len()));
        self.with_params(params, |opt| {
            // SAFETY: `host` has `length` floats; bound parameters are borrowed.
            check(unsafe { sys::dsopt_optimizer_export_f32(opt, count(index), host, length) })
        })
    }

    /// The reverse of [`Optimizer::export_f32`], rounded to nearest. A remainder also sets its parameter.
    pub fn import_f32(&mut self, index: usize, from: &[f32], params: &mut [TensorMut<'_>]) -> Result<()> {
        let (host, length) = (from.as_ptr(), count(from.len()));
        self.with_params_mut(params, |opt| {
            // SAFETY: `host` has `length` floats; bound parameters are borrowed mutably.
            check(unsafe { sys::dsopt_optimizer_import_f32(opt, count(index), host, length) })
        })
    }

    /// The functional form: a new state with its initial values, for [`Optimizer::apply`].
    ///
    /// Parameters are written to only in DeepSpeed's mode with masters, which executes a step on zero gradients first.
    pub fn new_state(&self, params: &mut [TensorMut<'_>]) -> Result<Vec<Array>> {
        let mut arrays: Vec<Array> = self.state()?.iter().map(|entry| Array::zeros(entry.dtype, entry.numel)).collect();
        let mut state: Vec<TensorMut<'_>> = arrays.iter_mut().map(Array::as_tensor_mut).collect();
        self.init_state(params, &mut state)?;
        drop(state);
        Ok(arrays)
    }

    /// The functional form: write the initial values of every entry to `state`.
    pub fn init_state(&self, params: &mut [TensorMut<'_>], state: &mut [TensorMut<'_>]) -> Result<()> {
        let _busy = self.use_comms()?;
        init_state(self.as_ptr(), params, state)
    }

    /// Decode the words of the state tensor "schedule".
    pub fn decode_schedule(&self, words: &[i32; 8]) -> Result<Schedule> {
        let mut info = sys::zeroed!(dsopt_schedule_info);
        // SAFETY: eight words of host memory, and a struct whose size is set.
        check(unsafe { sys::dsopt_schedule_decode(self.as_ptr(), words.as_ptr(), &mut info) })?;
        Ok(Schedule {
            step: info.step,
            frozen: info.frozen != 0,
            var_interval: info.var_interval,
            var_counter: info.var_counter,
            local_interval: info.local_interval,
            local_counter: info.local_counter,
            momentum_in_bits: info.momentum_in_bits != 0,
            reduction: Reduction::of(info.reduction)?,
        })
    }
}

impl Applier {
    /// Write the initial values of every entry to `state`. See [`Optimizer::new_state`].
    pub fn init_state(&self, params: &mut [TensorMut<'_>], state: &mut [TensorMut<'_>]) -> Result<()> {
        init_state(self.handle.as_ptr(), params, state)
    }
}

fn init_state(
    opt: *const sys::dsopt_optimizer,
    params: &mut [TensorMut<'_>],
    state: &mut [TensorMut<'_>],
) -> Result<()> {
    let (param_list, param_count) = (list_mut(params), count(params.len()));
    let (state_list, state_count) = (list_mut(state), count(state.len()));
    // SAFETY: both lists are borrowed mutably, and have the lengths of their counts.
    check(unsafe {
        sys::dsopt_optimizer_init_state(opt, param_list, param_count, state_list, state_count, ptr::null_mut())
    })
}

fn dtype_of(raw: &sys::dsopt_state_info) -> Result<Dtype> {
    let text = || format!("a state has dtype {}, which is unknown to this crate", raw.tensor.dtype);
    Dtype::of(raw.tensor.dtype).ok_or_else(|| Error::new(sys::DSOPT_ERR_VERSION, text()))
}

/// # Safety
/// `numel` elements of this type, unchanged during `'a`, unless there are none.
unsafe fn elements<'a, T: Element>(tensor: &sys::dsopt_tensor) -> &'a [T] {
    match usize::try_from(tensor.numel) {
        // SAFETY: promised by the caller.
        Ok(numel) if numel > 0 => unsafe { slice::from_raw_parts(tensor.data.cast(), numel) },
        _ => &[],
    }
}
