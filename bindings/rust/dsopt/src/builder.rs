// SPDX-License-Identifier: Apache-2.0
use crate::error::owned;
use crate::optimizer::Optimizer;
use crate::{sys, Comm, Context, Result, Scaler};
use std::ptr::{self, NonNull};

/// Policy of a step for Inf and NaN in gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Nonfinite {
    /// Skip the step if the gradients are read for scaling or clipping anyway, else apply them. The default.
    Auto = 0,
    /// Always check, and skip.
    Skip = 1,
    /// Apply them.
    Apply = 2,
}

/// Ranks over which state is spread, see [`OptimizerBuilder::shard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shard {
    /// All data-parallel ranks, those of `data` and `node`.
    Data = sys::DSOPT_OPTIMIZER_SHARD as isize,
    /// The ranks of `node`: every node has all of the state.
    Node = sys::DSOPT_OPTIMIZER_SHARD_NODE as isize,
}

/// Options of an [`Optimizer`]. Comms are moved in.
#[derive(Debug)]
#[must_use = "build() makes the optimizer"]
pub struct OptimizerBuilder {
    context: Context,
    desc: sys::dsopt_optimizer_desc,
    scaler: Option<Scaler>,
    comms: Comms,
}

// SAFETY: the pointers of the desc are set only when it is used.
unsafe impl Send for OptimizerBuilder {}

/// The comms that an optimizer uses.
#[derive(Debug, Default)]
pub(crate) struct Comms {
    pub data: Option<Comm>,
    pub model: Option<Comm>,
    pub node: Option<Comm>,
    pub experts: Vec<Comm>,
}

impl Comms {
    pub fn is_empty(&self) -> bool {
        self.data.is_none() && self.model.is_none() && self.node.is_none() && self.experts.is_empty()
    }
}

/// Methods that set a flag.
macro_rules! flags {
    ($($(#[$text:meta])* $name:ident = $flag:ident,)*) => {
        $(
            $(#[$text])*
            pub fn $name(mut self) -> Self {
                self.desc.flags |= sys::$flag;
                self
            }
        )*
    };
}

impl OptimizerBuilder {
    pub(crate) fn new(context: &Context) -> OptimizerBuilder {
        let desc = sys::zeroed!(dsopt_optimizer_desc);
        OptimizerBuilder { context: context.clone(), desc, scaler: None, comms: Comms::default() }
    }

    flags! {
        /// 16-bit parameters without an fp32 master.
        no_master = DSOPT_OPTIMIZER_NO_MASTER,
        /// Weight norm and update norm in the report.
        report_norms = DSOPT_OPTIMIZER_REPORT_NORMS,
        /// An fp32 gradient accumulator per parameter, for [`Optimizer::accumulate`].
        accumulators = DSOPT_OPTIMIZER_ACCUMULATE,
        /// Times per phase in the report.
        timing = DSOPT_OPTIMIZER_TIMING,
        /// Gradients are those of this rank, and the step averages them over the data-parallel ranks. It needs
        /// [`data`](OptimizerBuilder::data) or [`node`](OptimizerBuilder::node). An
        /// [absent](crate::TensorRef::absent) gradient counts as zeros.
        averages = DSOPT_OPTIMIZER_AVERAGES,
        /// Data-parallel ranks compare their calls before each step.
        check_ranks = DSOPT_OPTIMIZER_CHECK_RANKS,
        /// 1-bit Adam: after the freeze, keep momentum as the bits of the last exchange.
        momentum_bits = DSOPT_OPTIMIZER_MOMENTUM_BITS,
        /// [`Muon`](crate::Muon): the data-parallel ranks, with [`node`](OptimizerBuilder::node) those of a node, share
        /// out the orthogonalisation of matrices. Weights have the same bits for any number of ranks. Not with
        /// [`shard`](OptimizerBuilder::shard).
        split_matrices = DSOPT_OPTIMIZER_SPLIT_MATRICES,
    }

    /// bfloat16 parameters without masters are rounded up or down at random. Implies `no_master`. The seed is that of
    /// [`seed`](OptimizerBuilder::seed).
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.desc.flags |= sys::DSOPT_OPTIMIZER_NO_MASTER | sys::DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
        self.seed(seed)
    }

    /// Seed of what is rounded at random, such as [`Moment::Bf16Random`](crate::Moment::Bf16Random).
    pub fn seed(mut self, seed: u64) -> Self {
        self.desc.seed = seed;
        self
    }

    /// DeepSpeed's optimizers step by step, quirks included.
    pub fn deepspeed(mut self) -> Self {
        self.desc.compat = sys::DSOPT_COMPAT_DEEPSPEED;
        self
    }

    /// Policy for Inf and NaN in gradients.
    pub fn nonfinite(mut self, policy: Nonfinite) -> Self {
        self.desc.nonfinite = policy as i32;
        self
    }

    /// The masters of a group are contiguous.
    pub fn flat_masters(mut self) -> Self {
        self.desc.masters = sys::DSOPT_MASTERS_FLAT;
        self
    }

    /// The master of a bfloat16 parameter is the parameter itself together with 16 more bits, in the state tensor
    /// "remainder". Calls that read or write masters need the parameters.
    pub fn remainder_masters(mut self) -> Self {
        self.desc.masters = sys::DSOPT_MASTERS_REMAINDER;
        self
    }

    /// Clip by the L2 norm of all gradients. 0 is off.
    pub fn max_norm(mut self, norm: f64) -> Self {
        self.desc.max_norm = norm;
        self
    }

    /// Clip every element of the gradients, after clipping by norm. 0 is off.
    pub fn max_value(mut self, value: f64) -> Self {
        self.desc.max_value = value;
        self
    }

    /// After this many skipped steps in a row a step fails with [`ErrorKind::Skips`](crate::ErrorKind::Skips).
    pub fn skip_budget(mut self, steps: i32) -> Self {
        self.desc.skip_budget = steps;
        self
    }

    /// Gradients have this loss scale, and steps update it.
    pub fn scaler(mut self, scaler: &Scaler) -> Self {
        self.scaler = Some(scaler.clone());
        self
    }

    /// The data-parallel ranks.
    pub fn data(mut self, comm: Comm) -> Self {
        self.comms.data = Some(comm);
        self
    }

    /// The model-parallel ranks.
    pub fn model(mut self, comm: Comm) -> Self {
        self.comms.model = Some(comm);
        self
    }

    /// The ranks of this node; `data` then has the ranks with the same rank in their node.
    pub fn node(mut self, comm: Comm) -> Self {
        self.comms.node = Some(comm);
        self
    }

    /// One more comm of expert-parallel ranks, see [`Param::expert`](crate::Param::expert).
    pub fn expert(mut self, comm: Comm) -> Self {
        self.comms.experts.push(comm);
        self
    }

    /// State is spread over data-parallel ranks: each keeps and updates the part of [`Optimizer::shard`], and gets the
    /// other weights from the other ranks. Weights have the same bits as without it. Every step is then collective.
    pub fn shard(mut self, ranks: Shard) -> Self {
        self.desc.flags &= !(sys::DSOPT_OPTIMIZER_SHARD | sys::DSOPT_OPTIMIZER_SHARD_NODE);
        self.desc.flags |= ranks as i32;
        self
    }

    /// Make the optimizer, without groups.
    pub fn build(mut self) -> Result<Optimizer> {
        let pointer = |comm: &Option<Comm>| comm.as_ref().map_or(ptr::null_mut(), Comm::as_ptr);
        self.desc.data = pointer(&self.comms.data);
        self.desc.model = pointer(&self.comms.model);
        self.desc.node = pointer(&self.comms.node);
        let experts: Vec<_> = self.comms.experts.iter().map(Comm::as_ptr).collect();
        self.desc.experts = if experts.is_empty() { ptr::null() } else { experts.as_ptr() };
        self.desc.expert_count = i32::try_from(experts.len()).unwrap_or(i32::MAX);
        self.desc.scaler = self.scaler.as_ref().map_or(ptr::null_mut(), Scaler::as_ptr);
        let mut handle = ptr::null_mut();
        let status = {
            let _inside = self.scaler.as_ref().map(Scaler::enter).transpose()?;
            // SAFETY: context, scaler and comms live, and the list of experts outlives the call.
            unsafe { sys::dsopt_optimizer_create(self.context.as_ptr(), &self.desc, &mut handle) }
        };
        let deepspeed = self.desc.compat == sys::DSOPT_COMPAT_DEEPSPEED;
        let averages = self.desc.flags & sys::DSOPT_OPTIMIZER_AVERAGES != 0;
        let (context, scaler, comms) = (self.context, self.scaler, self.comms);
        let own = |handle| Optimizer::own(handle, context, scaler, comms, deepspeed, averages);
        owned(status, NonNull::new(handle).map(own))
    }
}
