// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, count};
use crate::tensor::list_mut;
use crate::{sys, Comm, Error, Result, TensorMut};
use std::ptr;

/// The error-compensated 1-bit mean of a list over the ranks of a comm, and the residuals of this rank.
///
/// ```
/// # use dsopt::{Comm, Compressed, Context};
/// # let ctx = Context::cpu()?;
/// let mut comm = Comm::single(&ctx)?;
/// let mut exchange = Compressed::new();
/// let mut x = vec![1.0f32, -3.0];
/// exchange.all_reduce(&mut comm, None, &mut [(&mut x).into()])?;
/// assert!(x[0] > 0.0 && x[1] == -x[0]); // signs and one scale
/// # Ok::<(), dsopt::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Compressed {
    worker: Vec<f32>,
    server: Vec<f32>,
    workspace: Vec<u8>,
    /// Sizes of the list of the first call.
    numels: Vec<usize>,
    deepspeed: bool,
}

/// The residuals of a rank, one number per element: [`Compressed::errors`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Errors {
    /// Residuals as a worker.
    pub worker: Vec<f32>,
    /// Residuals as a server.
    pub server: Vec<f32>,
}

impl Compressed {
    /// A new exchange with zero residuals. The first call determines the sizes of the list.
    pub fn new() -> Compressed {
        Compressed::default()
    }

    /// A new exchange with the padding of DeepSpeed's compressed_allreduce.
    pub fn deepspeed() -> Compressed {
        Compressed { deepspeed: true, ..Compressed::default() }
    }

    fn arguments(&self, node: Option<&mut Comm>, tensors: &mut [TensorMut<'_>]) -> sys::dsopt_compressed {
        let mut args = sys::zeroed!(dsopt_compressed);
        args.count = count(tensors.len());
        args.tensors = list_mut(tensors);
        args.compat = if self.deepspeed { sys::DSOPT_COMPAT_DEEPSPEED } else { sys::DSOPT_COMPAT_NONE };
        args.node = node.map_or(ptr::null_mut(), |node| node.as_ptr());
        args
    }

    /// Checks the buffers for this list, or creates them before the first exchange.
    fn prepare(&mut self, comm: &Comm, args: &mut sys::dsopt_compressed, tensors: &[TensorMut<'_>]) -> Result<()> {
        comm.context().host_only("the buffer of a compressed all-reduce")?;
        let (mut worker, mut server, mut workspace) = (0, 0, 0);
        // SAFETY: the comm lives, and the list is borrowed by the caller.
        check(unsafe { sys::dsopt_compressed_sizes(comm.as_ptr(), args, &mut worker, &mut server, &mut workspace) })?;
        let (worker, server) = (usize::try_from(worker).unwrap_or(0), usize::try_from(server).unwrap_or(0));
        if self.worker.is_empty() && self.server.is_empty() {
            self.worker.resize(worker, 0.0);
            self.server.resize(server, 0.0);
            self.numels = tensors.iter().map(TensorMut::numel).collect();
        }
        // Lists of other sizes may have buffers of the same length, which is a multiple of a block.
        let same = self.numels.iter().copied().eq(tensors.iter().map(TensorMut::numel));
        if !same || self.worker.len() != worker || self.server.len() != server {
            let text = "compressed: the list, or the number of ranks, is not that of the first exchange";
            return Err(Error::new(sys::DSOPT_ERR_SHAPE, text));
        }
        if self.workspace.len() < workspace {
            self.workspace.resize(workspace, 0);
        }
        args.worker_error = self.worker.as_mut_ptr();
        args.server_error = self.server.as_mut_ptr();
        args.workspace = self.workspace.as_mut_ptr().cast();
        args.workspace_bytes = self.workspace.len();
        Ok(())
    }

    /// Exchange the list and replace it by its mean. `node` has the ranks of this node, if there are two levels.
    ///
    /// After [`ErrorKind::Comm`](crate::ErrorKind::Comm) and similar errors the residuals are corrupted: use a new
    /// object.
    pub fn all_reduce(
        &mut self,
        comm: &mut Comm,
        node: Option<&mut Comm>,
        tensors: &mut [TensorMut<'_>],
    ) -> Result<()> {
        let mut args = self.arguments(node, tensors);
        self.prepare(comm, &mut args, tensors)?;
        // SAFETY: list and comms are borrowed mutably, and the buffers have the sizes that the library returned.
        check(unsafe { sys::dsopt_compressed_allreduce(comm.as_ptr(), &args) })
    }

    /// Returns the residuals of this rank, for the list of the exchanges. Not a collective.
    pub fn errors(
        &mut self,
        comm: &mut Comm,
        node: Option<&mut Comm>,
        tensors: &mut [TensorMut<'_>],
    ) -> Result<Errors> {
        let mut args = self.arguments(node, tensors);
        self.prepare(comm, &mut args, tensors)?;
        // The library writes no more than the buffers hold, scales included.
        let mut errors = Errors { worker: vec![0.0; self.worker.len()], server: vec![0.0; self.server.len()] };
        // SAFETY: as in all_reduce; the results have room for the buffers without their scales.
        let status = unsafe {
            sys::dsopt_compressed_errors(comm.as_ptr(), &args, errors.worker.as_mut_ptr(), errors.server.as_mut_ptr())
        };
        check(status)?;
        let scales = tensors.len();
        errors.worker.truncate(self.worker.len().saturating_sub(scales));
        let server = errors.worker.len() / comm.query()?.ranks.max(1);
        errors.server.truncate(server);
        Ok(errors)
    }
}
