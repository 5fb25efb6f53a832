// SPDX-License-Identifier: Apache-2.0
use crate::{panics, sys, Comm, Context, Element, Error, Result};
use std::ffi::{c_void, CString};
use std::mem::size_of;
use std::os::raw::{c_char, c_int};
use std::{ptr, slice};

/// Values of an all-reduce: this rank's before it, the reduced values after it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Values<'a> {
    /// `f32`
    F32(&'a mut [f32]),
    /// `f64`
    F64(&'a mut [f64]),
    /// `i32`
    I32(&'a mut [i32]),
}

/// Operation of an all-reduce of [`Collectives`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The largest.
    Max,
}

/// Reason for the failure of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommFailure {
    /// It failed.
    Failed,
    /// A peer did not join in time.
    Timeout,
    /// It was aborted.
    Aborted,
}

/// Collectives of the program, such as Gloo or MPI, in host memory.
///
/// The functions block until they are done. The engine calls the collectives one at a time; `error` and `abort` can
/// be called by any thread at any time. A panic counts as a failure and resumes after the call of dsopt in which it
/// happened.
pub trait Collectives: Send + Sync + 'static {
    /// True if [`Collectives::all_to_all`] is implemented. The engine can build it from all_gather, with more bytes.
    const ALL_TO_ALL: bool = false;
    /// True if [`Collectives::all_gather`] is implemented. The engine can build it from all_reduce, with more bytes.
    const ALL_GATHER: bool = false;
    /// True if [`Collectives::reduce_scatter`] is implemented, for [`Comm::table_summing`].
    const REDUCE_SCATTER: bool = false;

    /// Every rank must receive the same bits.
    fn all_reduce(&self, values: Values<'_>, op: Reduce) -> std::result::Result<(), CommFailure>;

    /// Both have `ranks` messages: message d of `send` goes to rank d, message s of `receive` comes from rank s.
    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> std::result::Result<(), CommFailure> {
        let _ = (send, receive);
        Err(CommFailure::Failed)
    }

    /// `receive` has `ranks` messages: message s comes from rank s.
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> std::result::Result<(), CommFailure> {
        let _ = (send, receive);
        Err(CommFailure::Failed)
    }

    /// `send` has `ranks` rows of the length of `receive`, which gets the sum over all ranks of the row of this rank, in
    /// any order of additions.
    fn reduce_scatter(&self, send: &[f32], receive: &mut [f32]) -> std::result::Result<(), CommFailure> {
        let _ = (send, receive);
        Err(CommFailure::Failed)
    }

    /// Error of the communicator, if any.
    fn error(&self) -> Option<String> {
        None
    }

    /// Make blocked calls return.
    fn abort(&self) {}
}

/// Target of the table's `self`.
struct Owned<T> {
    collectives: T,
    ranks: usize,
}

impl Comm {
    /// A comm on the program's collectives, which are moved in and dropped with the comm's last user.
    pub fn table<T: Collectives>(context: &Context, rank: usize, ranks: usize, collectives: T) -> Result<Comm> {
        Comm::table_of(context, rank, ranks, collectives, 0)
    }

    /// As [`Comm::table`]. Means of gradients that an optimizer forms ([`averages`](crate::OptimizerBuilder::averages))
    /// are added up by [`Collectives::reduce_scatter`], in its order.
    pub fn table_summing<T: Collectives>(context: &Context, rank: usize, ranks: usize, collectives: T) -> Result<Comm> {
        Comm::table_of(context, rank, ranks, collectives, sys::DSOPT_COMM_FLAG_PROVIDER_SUMS)
    }

    fn table_of<T: Collectives>(
        context: &Context,
        rank: usize,
        ranks: usize,
        collectives: T,
        flags: i32,
    ) -> Result<Comm> {
        let number = |name, value| {
            i32::try_from(value).map_err(|_| Error::argument(format!("{name} is {value}, which is too large")))
        };
        let mut table = sys::zeroed!(dsopt_comm_table);
        table.rank = number("rank", rank)?;
        table.ranks = number("ranks", ranks)?;
        table.all_reduce = Some(all_reduce::<T>);
        if T::ALL_TO_ALL {
            table.all_to_all = Some(all_to_all::<T>);
        }
        if T::ALL_GATHER {
            table.all_gather = Some(all_gather::<T>);
        }
        if T::REDUCE_SCATTER {
            table.reduce_scatter = Some(reduce_scatter::<T>);
        }
        table.error = Some(error::<T>);
        table.abort = Some(abort::<T>);
        table.destroy = Some(destroy::<T>);
        table.memory = sys::DSOPT_MEMORY_HOST;
        let owned = Box::into_raw(Box::new(Owned { collectives, ranks }));
        table.self_ = owned.cast();
        let mut desc = sys::zeroed!(dsopt_comm_desc);
        desc.kind = sys::DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        desc.flags = flags;
        let mut handle = ptr::null_mut();
        // SAFETY: the table is copied; its functions receive the pointer that `destroy` frees.
        let status = unsafe { sys::dsopt_comm_create(context.as_ptr(), &desc, &mut handle) };
        if handle.is_null() {
            // SAFETY: on failure the caller still owns the table, so `destroy` has not been called and will not be.
            drop(unsafe { Box::from_raw(owned) });
        }
        Comm::own(context, status, handle)
    }
}

/// A slice from C: any pointer is allowed if it is empty.
unsafe fn read<'a, T>(data: *const c_void, length: usize) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller promises this memory.
    unsafe { slice::from_raw_parts(data.cast(), length) }
}

unsafe fn write<'a, T>(data: *mut c_void, length: usize) -> &'a mut [T] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: the caller promises this memory.
    unsafe { slice::from_raw_parts_mut(data.cast(), length) }
}

fn code(result: std::result::Result<(), CommFailure>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(CommFailure::Failed) => -sys::DSOPT_ERR_COMM,
        Err(CommFailure::Timeout) => -sys::DSOPT_ERR_TIMEOUT,
        Err(CommFailure::Aborted) => -sys::DSOPT_ERR_ABORTED,
    }
}

/// Calls a function of the table. A panic is a failure.
unsafe fn guarded<T: Collectives>(
    this: *mut c_void,
    call: impl FnOnce(&Owned<T>) -> std::result::Result<(), CommFailure>,
) -> c_int {
    panics::catch(-sys::DSOPT_ERR_COMM, || {
        // SAFETY: the pointer of the table, before `destroy`.
        code(call(unsafe { &*this.cast::<Owned<T>>() }))
    })
}

unsafe extern "C" fn all_reduce<T: Collectives>(
    this: *mut c_void,
    send: *const c_void,
    receive: *mut c_void,
    count: i64,
    dtype: i32,
    op: i32,
    _stream: *mut c_void,
) -> c_int {
    let call = |this: &Owned<T>| {
        let op = match op {
            sys::DSOPT_OP_SUM => Reduce::Sum,
            sys::DSOPT_OP_MAX => Reduce::Max,
            _ => return Err(CommFailure::Failed),
        };
        let count = usize::try_from(count).map_err(|_| CommFailure::Failed)?;
        let size = match dtype {
            sys::DSOPT_DTYPE_F32 | sys::DSOPT_DTYPE_I32 => 4,
            sys::DSOPT_DTYPE_F64 => 8,
            _ => return Err(CommFailure::Failed),
        };
        // SAFETY: both hold `count` elements of this dtype, may be the same, and are not used elsewhere during the
        // call.
        unsafe {
            if count != 0 {
                ptr::copy(send.cast::<u8>(), receive.cast::<u8>(), count * size);
            }
            let values = match dtype {
                sys::DSOPT_DTYPE_F32 => Values::F32(write(receive, count)),
                sys::DSOPT_DTYPE_F64 => Values::F64(write(receive, count)),
                _ => Values::I32(write(receive, count)),
            };
            this.collectives.all_reduce(values, op)
        }
    };
    // SAFETY: `this` is the table's `self` pointer.
    unsafe { guarded::<T>(this, call) }
}

/// Calls `move_rows` with slices of these lengths. `receive` is zeroed first, because its memory may be uninitialized;
/// `send` is copied if the two overlap.
unsafe fn with_rows<E: Element>(
    send: *const c_void,
    sent: usize,
    receive: *mut c_void,
    received: usize,
    move_rows: impl FnOnce(&[E], &mut [E]) -> std::result::Result<(), CommFailure>,
) -> std::result::Result<(), CommFailure> {
    let (from, to, size) = (send as usize, receive as usize, size_of::<E>());
    let copy = if sent != 0 && received != 0 && from < to + received * size && to < from + sent * size {
        // SAFETY: the caller promises this memory.
        Some(unsafe { read::<E>(send, sent) }.to_vec())
    } else {
        None
    };
    if received != 0 {
        // SAFETY: the caller promises this memory.
        unsafe { ptr::write_bytes(receive.cast::<E>(), 0, received) };
    }
    match copy {
        // SAFETY: the caller promises this memory.
        Some(copy) => move_rows(&copy, unsafe { write(receive, received) }),
        // SAFETY: as above, and the two do not overlap.
        None => unsafe { move_rows(read(send, sent), write(receive, received)) },
    }
}

unsafe extern "C" fn all_to_all<T: Collectives>(
    this: *mut c_void,
    send: *const c_void,
    receive: *mut c_void,
    bytes_per_rank: i64,
    _stream: *mut c_void,
) -> c_int {
    let call = |this: &Owned<T>| {
        let bytes = usize::try_from(bytes_per_rank).map_err(|_| CommFailure::Failed)? * this.ranks;
        // SAFETY: both have a message per rank.
        unsafe { with_rows::<u8>(send, bytes, receive, bytes, |from, to| this.collectives.all_to_all(from, to)) }
    };
    // SAFETY: `this` is the table's `self` pointer.
    unsafe { guarded::<T>(this, call) }
}

unsafe extern "C" fn all_gather<T: Collectives>(
    this: *mut c_void,
    send: *const c_void,
    receive: *mut c_void,
    bytes_per_rank: i64,
    _stream: *mut c_void,
) -> c_int {
    let call = |this: &Owned<T>| {
        let bytes = usize::try_from(bytes_per_rank).map_err(|_| CommFailure::Failed)?;
        let all = bytes * this.ranks;
        // SAFETY: one message to send, and a message per rank to receive.
        unsafe { with_rows::<u8>(send, bytes, receive, all, |from, to| this.collectives.all_gather(from, to)) }
    };
    // SAFETY: `this` is the table's `self` pointer.
    unsafe { guarded::<T>(this, call) }
}

unsafe extern "C" fn reduce_scatter<T: Collectives>(
    this: *mut c_void,
    send: *const c_void,
    receive: *mut c_void,
    count: i64,
    dtype: i32,
    op: i32,
    _stream: *mut c_void,
) -> c_int {
    let call = |this: &Owned<T>| {
        if dtype != sys::DSOPT_DTYPE_F32 || op != sys::DSOPT_OP_SUM {
            return Err(CommFailure::Failed);
        }
        let count = usize::try_from(count).map_err(|_| CommFailure::Failed)?;
        let all = count * this.ranks;
        // SAFETY: a row of floats per rank to send, and one row to receive.
        unsafe { with_rows::<f32>(send, all, receive, count, |from, to| this.collectives.reduce_scatter(from, to)) }
    };
    // SAFETY: `this` is the table's `self` pointer.
    unsafe { guarded::<T>(this, call) }
}

unsafe extern "C" fn error<T: Collectives>(this: *mut c_void, text: *mut c_char, capacity: usize) -> c_int {
    panics::catch(1, || {
        // SAFETY: the pointer of the table, before `destroy`.
        let this = unsafe { &*this.cast::<Owned<T>>() };
        let reason = match this.collectives.error() {
            Some(reason) => CString::new(reason.replace('\0', " ")).unwrap_or_default(),
            None => return 0,
        };
        let bytes = reason.as_bytes();
        if !text.is_null() && capacity > 0 {
            let length = bytes.len().min(capacity - 1);
            // SAFETY: `capacity` bytes.
            unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, length);
                *text.add(length) = 0;
            }
        }
        1
    })
}

unsafe extern "C" fn abort<T: Collectives>(this: *mut c_void) {
    // SAFETY: the pointer of the table, before `destroy`.
    panics::catch((), || unsafe { &*this.cast::<Owned<T>>() }.collectives.abort())
}

unsafe extern "C" fn destroy<T: Collectives>(this: *mut c_void) {
    // SAFETY: from Box::into_raw, and the last call of the table.
    panics::catch((), || drop(unsafe { Box::from_raw(this.cast::<Owned<T>>()) }))
}
