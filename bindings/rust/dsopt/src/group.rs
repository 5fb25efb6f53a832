// SPDX-License-Identifier: Apache-2.0
use crate::error::check;
use crate::{sys, Dtype, Error, Result};
use std::ffi::CString;
use std::mem::{size_of, MaybeUninit};
use std::ptr;

pub(crate) mod sealed {
    pub trait Sealed {
        fn raw(&self) -> crate::Result<crate::sys::dsopt_group>;
    }
}

/// An algorithm and its hyper-parameters: [`AdamW`], [`Lamb`], [`Muon`](crate::Muon) and the others. `dsopt.h` has the formulas.
pub trait Group: sealed::Sealed {}

pub(crate) fn raw(group: &dyn Group) -> Result<sys::dsopt_group> {
    group.raw()
}

/// How a moment is stored between steps; within a step it is `f32`. `dsopt.h` compares the formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Moment {
    /// `f32`. The default.
    F32 = 0,
    /// bfloat16, rounded to nearest. Not for means and sums of squares.
    Bf16 = 1,
    /// bfloat16, rounded up or down at random, see [`OptimizerBuilder::seed`](crate::OptimizerBuilder::seed).
    Bf16Random = 2,
    /// FP8 E4M3 with a scale per 256 elements. Not for means and sums of squares.
    E4m3 = 3,
    /// The 8-bit dynamic map of bitsandbytes and torchao, with a scale per 256 elements. Not for sums of squares.
    Q8 = 4,
}

/// Returns a group with the library's defaults.
pub(crate) fn defaults(algorithm: i32) -> Result<sys::dsopt_group> {
    let mut group = MaybeUninit::<sys::dsopt_group>::zeroed();
    // SAFETY: the struct has the size that is passed, and every byte of it is written on success.
    unsafe {
        check(sys::dsopt_group_init(group.as_mut_ptr(), size_of::<sys::dsopt_group>(), algorithm))?;
        Ok(group.assume_init())
    }
}

/// Documentation of fields that several algorithms have.
macro_rules! text_of {
    (lr) => {
        "Learning rate: finite, not negative."
    };
    (beta1) => {
        "Decay of the mean of gradients, in `[0, 1)`."
    };
    (beta2) => {
        "Decay of the mean of squares, in `[0, 1)`."
    };
    (eps) => {
        "Added to the root of the mean of squares."
    };
    (exp_avg_format) => {
        "Format of the mean of gradients, or of the momentum."
    };
    (exp_avg_sq_format) => {
        "Format of the mean or the sum of squares."
    };
}

/// Fields with their defaults, which are those of `dsopt_group_init`: in parentheses the fields of [`text_of`], then
/// fields with their own documentation, then the formats of the moments that the algorithm has. Without `decays` the
/// default weight decay is 0. A `bool` sets or clears each flag.
macro_rules! groups {
    ($(
        $(#[$text:meta])*
        $name:ident = $algorithm:ident($($shared:ident = $shared_default:expr),*) $(decays $decay:literal)? {
            $($(#[$field_text:meta])* $field:ident: $kind:ty = $default:expr,)*
        }
        $(formats($($format:ident),*))?
        set { $($(#[$set_text:meta])* $set:ident = $set_flag:ident,)* }
        unset { $($(#[$unset_text:meta])* $unset:ident = $unset_flag:ident,)* }
    )*) => {
        $(
            $(#[$text])*
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub struct $name {
                $(#[doc = text_of!($shared)] pub $shared: f64,)*
                /// Weight decay.
                pub weight_decay: f64,
                /// Clip by the L2 norm of this group's gradients alone. 0 is off.
                pub max_norm: f64,
                $($(#[$field_text])* pub $field: $kind,)*
                $($(#[doc = text_of!($format)] pub $format: Moment,)*)?
                $($(#[$set_text])* pub $set: bool,)*
                $($(#[$unset_text])* pub $unset: bool,)*
            }

            impl Default for $name {
                fn default() -> $name {
                    $name {
                        $($shared: $shared_default,)*
                        weight_decay: 0.0 $(+ $decay)?,
                        max_norm: 0.0,
                        $($field: $default,)*
                        $($($format: Moment::F32,)*)?
                        $($set: false,)*
                        $($unset: true,)*
                    }
                }
            }

            impl sealed::Sealed for $name {
                fn raw(&self) -> Result<sys::dsopt_group> {
                    let mut group = defaults(sys::$algorithm)?;
                    $(group.$shared = self.$shared;)*
                    group.weight_decay = self.weight_decay;
                    group.max_norm = self.max_norm;
                    $(group.$field = self.$field;)*
                    $($(group.$format = self.$format as i32;)*)?
                    $(if self.$set {
                        group.flags |= sys::$set_flag;
                    })*
                    $(if !self.$unset {
                        group.flags |= sys::$unset_flag;
                    })*
                    Ok(group)
                }
            }

            impl Group for $name {}
        )*

        #[cfg(test)]
        mod tests {
            use super::*;
            use sealed::Sealed;

            #[test]
            fn defaults_are_those_of_the_library() {
                $(
                    let (initial, library) = ($name::default().raw().unwrap(), defaults(sys::$algorithm).unwrap());
                    assert_eq!(format!("{initial:?}"), format!("{library:?}"), stringify!($name));
                )*
            }
        }
    };
}

groups! {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019), which is 0.01 by default.
    ///
    /// ```
    /// let group = dsopt::AdamW { lr: 3e-4, weight_decay: 0.1, ..Default::default() };
    /// ```
    AdamW = DSOPT_ALGORITHM_ADAMW(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) decays 0.01 {}
    formats(exp_avg_format, exp_avg_sq_format)
    set {
        /// `eps` next to the root of the uncorrected mean of squares, as in Keras.
        eps_uncorrected = DSOPT_GROUP_EPS_UNCORRECTED,
    }
    unset {
        /// Divide the means by `1 - beta^t`.
        bias_correction = DSOPT_GROUP_NO_BIAS_CORRECTION,
    }

    /// Adam with weight decay as L2 (Kingma and Ba 2015).
    Adam = DSOPT_ALGORITHM_ADAM(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {}
    formats(exp_avg_format, exp_avg_sq_format)
    set {
        /// `eps` next to the root of the uncorrected mean of squares, as in Keras.
        eps_uncorrected = DSOPT_GROUP_EPS_UNCORRECTED,
    }
    unset {
        /// Divide the means by `1 - beta^t`.
        bias_correction = DSOPT_GROUP_NO_BIAS_CORRECTION,
    }

    /// The first fused Adam of apex: `eps` acts on the uncorrected mean of squares.
    AdamLegacy = DSOPT_ALGORITHM_ADAM_LEGACY(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {}
    formats(exp_avg_format, exp_avg_sq_format)
    set {
        /// `sqrt(v + eps)` in place of `sqrt(v) + eps`.
        eps_inside_sqrt = DSOPT_GROUP_EPS_INSIDE_SQRT,
    }
    unset {
        /// Divide the means by `1 - beta^t`.
        bias_correction = DSOPT_GROUP_NO_BIAS_CORRECTION,
    }

    /// LAMB (You et al. 2020), as in DeepSpeed's FusedLamb.
    Lamb = DSOPT_ALGORITHM_LAMB(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {
        /// Lower bound of the trust ratio.
        min_trust: f64 = 0.01,
        /// Upper bound of the trust ratio.
        max_trust: f64 = 10.0,
    }
    formats(exp_avg_format, exp_avg_sq_format)
    set {
        /// `sqrt(v + eps)` in place of `sqrt(v) + eps`.
        eps_inside_sqrt = DSOPT_GROUP_EPS_INSIDE_SQRT,
    }
    unset {
        /// Divide the means by `1 - beta^t`.
        bias_correction = DSOPT_GROUP_NO_BIAS_CORRECTION,
    }

    /// Stochastic gradient descent with weight decay as L2, as in torch.optim.SGD.
    Sgd = DSOPT_ALGORITHM_SGD(lr = 1e-3) {
        /// Decay of the momentum per step. 0 is no momentum and no state, and cannot change later.
        momentum: f64 = 0.0,
        /// Fraction of the gradient that is not added to the momentum after the first step, in `[0, 1]`.
        dampening: f64 = 0.0,
    }
    formats(exp_avg_format)
    set {
        /// Nesterov's momentum. Needs a momentum, and no dampening.
        nesterov = DSOPT_GROUP_NESTEROV,
    }
    unset {}

    /// Adagrad (Duchi et al. 2011) with weight decay as L2, as in torch.optim.Adagrad.
    Adagrad = DSOPT_ALGORITHM_ADAGRAD(lr = 1e-2) {
        /// Added to the root of the sum of squares.
        eps: f64 = 1e-10,
        /// Step t has the learning rate `lr / (1 + (t - 1) lr_decay)`.
        lr_decay: f64 = 0.0,
        /// Initial sum of squares.
        initial_accumulator_value: f64 = 0.0,
    }
    formats(exp_avg_sq_format)
    set {
        /// `sqrt(sum + eps)` in place of `sqrt(sum) + eps`, as in optax.
        eps_inside_sqrt = DSOPT_GROUP_EPS_INSIDE_SQRT,
    }
    unset {}

    /// Lion (Chen et al. 2023): the sign of a mean of gradients, with decoupled weight decay.
    Lion = DSOPT_ALGORITHM_LION(lr = 1e-4) {
        /// Weight of the running mean in the direction, whose sign is the update, in `[0, 1)`.
        beta1: f64 = 0.9,
        /// Decay of the running mean of gradients, in `[0, 1)`.
        beta2: f64 = 0.99,
    }
    formats(exp_avg_format)
    set {}
    unset {}

    /// 1-bit Adam (Tang et al. 2021).
    OneBitAdam = DSOPT_ALGORITHM_ONEBIT_ADAM(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {
        /// Number of the last step that changes the variance.
        freeze_step: i64 = 100_000,
    }
    set {
        /// Never compress this group, and never freeze its variance.
        non_freeze = DSOPT_GROUP_NON_FREEZE,
    }
    unset {}

    /// 0/1 Adam (Lu et al. 2022).
    ZeroOneAdam = DSOPT_ALGORITHM_ZERO_ONE_ADAM(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {
        /// Number of the last step that changes the variance.
        freeze_step: i64 = 100_000,
        /// Number of variance steps after which their interval doubles.
        var_interval_steps: i64 = 16,
        /// Number of steps after which the interval of exchanges doubles.
        local_interval_steps: i64 = 32_678,
        /// Longest interval of exchanges.
        max_local_interval: i64 = 16,
    }
    set {}
    unset {}

    /// 1-bit LAMB (Li et al. 2021).
    OneBitLamb = DSOPT_ALGORITHM_ONEBIT_LAMB(lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {
        /// Number of the last step that changes the variance.
        freeze_step: i64 = 100_000,
        /// Lower bound of the trust ratio.
        min_trust: f64 = 0.01,
        /// Upper bound of the trust ratio.
        max_trust: f64 = 10.0,
        /// Decay of the running mean of the trust ratio.
        trust_beta: f64 = 0.9,
        /// Largest relative change of the factor per step.
        trust_threshold: f64 = 0.1,
        /// Lower bound of the factor.
        trust_min_change: f64 = 0.5,
        /// Upper bound of the factor.
        trust_max_change: f64 = 4.0,
    }
    set {}
    unset {}
}

/// A parameter as it is registered: name, dtype and size. Its memory is passed to each call.
#[derive(Clone, Debug)]
pub struct Param {
    name: Vec<u8>,
    dtype: Dtype,
    numel: usize,
    dims: Vec<i64>,
    flags: i32,
    offset: i64,
    expert: i32,
    group: i32,
    rows: i64,
    cols: i64,
}

impl Param {
    /// A flat parameter. The name must be unique in its optimizer.
    pub fn new(name: impl Into<String>, dtype: Dtype, numel: usize) -> Param {
        let name = name.into().into_bytes();
        Param { name, dtype, numel, dims: Vec::new(), flags: 0, offset: 0, expert: 0, group: 0, rows: 0, cols: 0 }
    }

    /// A parameter with a shape, for checkpoints and for [`Muon`](crate::Muon).
    pub fn shaped(name: impl Into<String>, dtype: Dtype, dims: &[usize]) -> Param {
        // Saturates, so that a product that overflows is refused.
        let numel = dims.iter().fold(1usize, |numel, &dim| numel.saturating_mul(dim));
        let mut param = Param::new(name, dtype, numel);
        param.dims = dims.iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
        param
    }

    /// Index of its group, for [`Optimizer::add_params`](crate::Optimizer::add_params).
    pub fn group(mut self, index: i32) -> Param {
        self.group = index;
        self
    }

    /// This rank has one shard, and the ranks of the model comm have the others.
    pub fn model_parallel(mut self) -> Param {
        self.flags |= sys::DSOPT_PARAM_MODEL_PARALLEL;
        self
    }

    /// Another pipeline stage has the same parameter, and counts it in norms.
    pub fn replicated(mut self) -> Param {
        self.flags |= sys::DSOPT_PARAM_REPLICATED;
        self
    }

    /// The 1-bit family: the exchanged mean is multiplied with the state tensor "mask", which is initially zero.
    pub fn masked(mut self) -> Param {
        self.flags |= sys::DSOPT_PARAM_MASKED;
        self
    }

    /// The ranks of this expert comm, counted from 0, hold different experts.
    pub fn expert(mut self, comm: usize) -> Param {
        self.expert = i32::try_from(comm).map_or(i32::MAX, |comm| comm.saturating_add(1));
        self
    }

    /// The moments are `f32`, whatever the formats of the group: for embeddings, norms and biases.
    pub fn f32_moments(mut self) -> Param {
        self.flags |= sys::DSOPT_PARAM_F32_MOMENTS;
        self
    }

    /// First element if the parameter is a slice of a tensor of that name. For rounding at random, and for moments in
    /// [`Moment::E4m3`] or [`Moment::Q8`].
    pub fn offset(mut self, elements: usize) -> Param {
        self.offset = i64::try_from(elements).unwrap_or(i64::MAX);
        self
    }

    /// [`Muon`](crate::Muon): the tensor is partitioned into matrices of `rows` x `cols`, each orthogonalised on its
    /// own.
    ///
    /// If `cols` is the product of the last dims, every `rows` consecutive rows of that length are a matrix, as in stacks
    /// of experts and in fused queries, keys and values. Otherwise `cols` divides the last dim, and a matrix is `cols`
    /// columns of `rows` rows. A parameter without a shape, or with another number of dims than two, needs it.
    pub fn blocks(mut self, rows: usize, cols: usize) -> Param {
        self.rows = i64::try_from(rows).unwrap_or(i64::MAX);
        self.cols = i64::try_from(cols).unwrap_or(i64::MAX);
        self
    }

    /// [`Muon`](crate::Muon): the weight is used as `y = x W`, so a matrix has as many outputs as columns, see
    /// [`Adjust`](crate::Adjust).
    pub fn rows_are_inputs(mut self) -> Param {
        self.flags |= sys::DSOPT_PARAM_ROWS_ARE_INPUTS;
        self
    }
}

/// Parameters as structs of C, and the memory to which they point.
pub(crate) struct RawParams<'a> {
    pub list: Vec<sys::dsopt_param>,
    _names: Vec<CString>,
    _dims: std::marker::PhantomData<&'a [Param]>,
}

impl<'a> RawParams<'a> {
    pub fn new(params: &'a [Param]) -> Result<RawParams<'a>> {
        let mut names = Vec::with_capacity(params.len());
        let mut list = Vec::with_capacity(params.len());
        for param in params {
            let name = CString::new(param.name.as_slice())
                .map_err(|_| Error::argument(format!("the name of parameter {} has a NUL in it", list.len())))?;
            list.push(sys::dsopt_param {
                tensor: sys::dsopt_tensor {
                    data: ptr::null_mut(),
                    numel: i64::try_from(param.numel).unwrap_or(i64::MAX),
                    dtype: param.dtype as i32,
                    reserved: 0,
                },
                name: name.as_ptr(), // memory of the string, which does not move with it
                dims: if param.dims.is_empty() { ptr::null() } else { param.dims.as_ptr() },
                ndim: i32::try_from(param.dims.len()).unwrap_or(i32::MAX),
                flags: param.flags,
                offset: param.offset,
                expert: param.expert,
                group: param.group,
                rows: param.rows,
                cols: param.cols,
            });
            names.push(name);
        }
        Ok(RawParams { list, _names: names, _dims: std::marker::PhantomData })
    }
}
