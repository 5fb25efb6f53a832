// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, count, owned};
use crate::tensor::list_mut;
use crate::{panics, sys, Context, Error, Result, TensorMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

/// One rank's handle to a group of ranks that communicate.
///
/// Every rank makes the same calls in the same order. One thread at a time may use a comm, so it is moved into the
/// optimizer that uses it; [`Comm::handle`] is for other threads. The first failure makes the comm unusable: each later
/// call returns the same error.
#[derive(Debug)]
pub struct Comm {
    inner: Arc<Inner>,
}

/// Queries or aborts a comm, from any thread and at any time.
///
/// A handle keeps the comm alive: other ranks do not observe that this rank has left before the last handle is dropped.
#[derive(Clone, Debug)]
pub struct CommHandle {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: NonNull<sys::dsopt_comm>,
    context: Context,
}

// SAFETY: only `Comm`, borrowed mutably, makes collectives; other calls are query and abort, which any thread may make.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and this is its last use.
        panics::discard(|| unsafe { sys::dsopt_comm_destroy(self.handle.as_ptr()) });
    }
}

/// Kind of communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommKind {
    /// Ranks are threads of this process.
    Local = 1,
    /// NCCL; needs a CUDA context.
    Nccl = 2,
    /// HCCL of Ascend.
    Hccl = 3,
}

/// Bootstrap id of a comm, the same on all ranks: one rank creates it and sends it to the others by any means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommId {
    kind: CommKind,
    bytes: Vec<u8>,
}

impl CommId {
    /// Create an id.
    pub fn new(kind: CommKind) -> Result<CommId> {
        sys::check_abi().map_err(|reason| Error::new(sys::DSOPT_ERR_MISSING, reason))?;
        let mut size = 0;
        // SAFETY: NULL queries the size.
        check(unsafe { sys::dsopt_comm_unique_id(kind as i32, ptr::null_mut(), &mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: `bytes` has `size` bytes.
        check(unsafe { sys::dsopt_comm_unique_id(kind as i32, bytes.as_mut_ptr().cast(), &mut size) })?;
        bytes.truncate(size);
        Ok(CommId { kind, bytes })
    }

    /// An id that another process created.
    pub fn from_bytes(kind: CommKind, bytes: &[u8]) -> CommId {
        CommId { kind, bytes: bytes.to_vec() }
    }

    /// The bytes to send to another process.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Operation of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// The sum.
    Sum = 0,
    /// The largest.
    Max = 1,
    /// The sum times 1 / ranks.
    Mean = 2,
}

/// Health and counters of a comm. Bytes are payload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CommInfo {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Status of the first failure; 0 is none.
    pub status: i32,
    /// Collectives so far.
    pub calls: i64,
    /// Bytes sent by this rank.
    pub bytes_sent: i64,
    /// Bytes received by this rank.
    pub bytes_received: i64,
}

impl Inner {
    fn query(&self) -> Result<CommInfo> {
        let mut info = sys::zeroed!(dsopt_comm_info);
        // SAFETY: the handle lives; any thread may query.
        check(unsafe { sys::dsopt_comm_query(self.handle.as_ptr(), &mut info) })?;
        Ok(CommInfo {
            rank: usize::try_from(info.rank).unwrap_or(0),
            ranks: usize::try_from(info.ranks).unwrap_or(0),
            status: info.status,
            calls: info.calls,
            bytes_sent: info.bytes_sent,
            bytes_received: info.bytes_received,
        })
    }

    fn abort(&self) {
        // SAFETY: the handle lives; any thread may abort.
        unsafe { sys::dsopt_comm_abort(self.handle.as_ptr()) };
        panics::resume();
    }
}

impl CommHandle {
    /// Rank, health and counters, without waiting.
    pub fn query(&self) -> Result<CommInfo> {
        self.inner.query()
    }

    /// Make blocked and later calls fail with [`ErrorKind::Aborted`](crate::ErrorKind::Aborted).
    pub fn abort(&self) {
        self.inner.abort()
    }
}

impl Comm {
    /// A comm of one rank.
    pub fn single(context: &Context) -> Result<Comm> {
        let desc = sys::zeroed!(dsopt_comm_desc);
        // SAFETY: a desc of kind SELF needs nothing else.
        unsafe { Comm::from_desc(context, &desc) }
    }

    /// Connect to the other ranks, which must all call this function. Fails with
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if one does not join within 10 minutes.
    pub fn connect(context: &Context, id: &CommId, rank: usize, ranks: usize) -> Result<Comm> {
        Comm::connect_within(context, id, rank, ranks, Duration::from_secs(600))
    }

    /// As [`Comm::connect`], with a time-out for this call and every later one. `Duration::MAX` is no limit.
    pub fn connect_within(
        context: &Context,
        id: &CommId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Comm> {
        Comm::connect_of(context, id, rank, ranks, timeout, 0)
    }

    /// As [`Comm::connect_within`]. Means of gradients that an optimizer forms
    /// ([`averages`](crate::OptimizerBuilder::averages)) are added up by NCCL or HCCL, in its order, for links on which
    /// an all-to-all is slow.
    pub fn connect_summing(
        context: &Context,
        id: &CommId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Comm> {
        Comm::connect_of(context, id, rank, ranks, timeout, sys::DSOPT_COMM_FLAG_PROVIDER_SUMS)
    }

    fn connect_of(
        context: &Context,
        id: &CommId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
        flags: i32,
    ) -> Result<Comm> {
        let number = |name, value| {
            i32::try_from(value).map_err(|_| Error::argument(format!("{name} is {value}, which is too large")))
        };
        let mut desc = sys::zeroed!(dsopt_comm_desc);
        desc.kind = id.kind as i32;
        desc.rank = number("rank", rank)?;
        desc.ranks = number("ranks", ranks)?;
        desc.timeout_ms = i32::try_from(timeout.as_millis()).map_or(-1, |milliseconds| milliseconds.max(1));
        desc.id = id.bytes.as_ptr().cast();
        desc.id_bytes = id.bytes.len();
        desc.flags = flags;
        // SAFETY: the id outlives the call. Ranks of kind LOCAL are threads, which share memory only during
        // collectives.
        unsafe { Comm::from_desc(context, &desc) }
    }

    /// A comm of any kind, such as a table of C functions (MPI), or an `ncclComm_t` of the program.
    ///
    /// # Safety
    /// Everything to which the desc points must satisfy the requirements of `dsopt.h`, for as long as they apply.
    pub unsafe fn from_desc(context: &Context, desc: &sys::dsopt_comm_desc) -> Result<Comm> {
        let mut handle = ptr::null_mut();
        // SAFETY: the context lives; the rest is promised by the caller.
        let status = unsafe { sys::dsopt_comm_create(context.as_ptr(), desc, &mut handle) };
        Comm::own(context, status, handle)
    }

    /// Converts the result of creating a comm.
    pub(crate) fn own(context: &Context, status: i32, handle: *mut sys::dsopt_comm) -> Result<Comm> {
        let inner = |handle| Inner { handle, context: context.clone() };
        owned(status, NonNull::new(handle).map(|handle| Comm { inner: Arc::new(inner(handle)) }))
    }

    /// The handle in C, for calls of `dsopt-sys`. It is valid as long as this comm.
    pub fn as_ptr(&self) -> *mut sys::dsopt_comm {
        self.inner.handle.as_ptr()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    /// A handle for other threads, and for use after the comm has been moved into an optimizer.
    pub fn handle(&self) -> CommHandle {
        CommHandle { inner: self.inner.clone() }
    }

    /// Rank, health and counters, without waiting.
    pub fn query(&self) -> Result<CommInfo> {
        self.inner.query()
    }

    /// All-reduce a list in place, in fp32. Every rank receives the same bits.
    pub fn all_reduce(&mut self, tensors: &mut [TensorMut<'_>], op: Op) -> Result<()> {
        // SAFETY: tensors and comm are borrowed mutably.
        let status = unsafe {
            sys::dsopt_comm_all_reduce(
                self.as_ptr(),
                list_mut(tensors),
                count(tensors.len()),
                op as i32,
                ptr::null_mut(),
            )
        };
        check(status)
    }
}
