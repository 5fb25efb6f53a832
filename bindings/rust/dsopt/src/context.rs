// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, owned};
use crate::{panics, sys, Error, Result};
use std::ffi::{c_void, CStr};
use std::fmt;
use std::os::raw::c_char;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A thread pool: it calls the second argument once for every index below the first argument, on any threads, and
/// returns when all of them are done.
pub type ParallelFor = dyn Fn(usize, &(dyn Fn(usize) + Sync)) + Send + Sync;

/// A pool for one call.
pub(crate) type Pool<'a> = dyn Fn(usize, &(dyn Fn(usize) + Sync)) + Sync + 'a;

type Log = dyn Fn(LogLevel, &str) + Send + Sync;

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LogLevel {
    /// Something failed.
    Error = 1,
    /// Something is probably not as intended.
    Warn = 2,
    /// Rare events.
    Info = 3,
    /// Every call.
    Trace = 4,
}

struct Hooks {
    parallel_for: Option<Box<ParallelFor>>,
    log: Option<Box<Log>>,
}

/// Backend, threads and hooks. A clone is another handle to the same context.
///
/// Any number of threads may use one context:
///
/// ```
/// fn shared<T: Send + Sync>() {}
/// shared::<dsopt::Context>();
/// ```
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    handle: NonNull<sys::dsopt_context>,
    cuda: bool,
    /// From Box::into_raw. Everything that can call a hook holds this `Inner`.
    hooks: *mut Hooks,
}

// SAFETY: the header allows calls with one context from any number of threads, and the hooks are Send and Sync.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and this is its last use. No object can then call a hook, because each object
        // that was made with this context destroys its handle before it drops `Inner`.
        unsafe {
            panics::discard(|| sys::dsopt_context_destroy(self.handle.as_ptr()));
            drop(Box::from_raw(self.hooks));
        }
    }
}

impl Context {
    /// The CPU, with every default.
    pub fn cpu() -> Result<Context> {
        Context::builder().build()
    }

    /// A context with options.
    pub fn builder() -> ContextBuilder {
        let mut desc = sys::zeroed!(dsopt_context_desc);
        desc.backend = sys::DSOPT_BACKEND_CPU;
        ContextBuilder { desc, hooks: Hooks { parallel_for: None, log: None } }
    }

    /// The handle, for calls of `dsopt-sys`. It is valid as long as this context.
    pub fn as_ptr(&self) -> *mut sys::dsopt_context {
        self.inner.handle.as_ptr()
    }

    /// True if tensors are memory of a CUDA device.
    pub fn is_cuda(&self) -> bool {
        self.inner.cuda
    }

    /// Number of work items per step on the CPU, and of threads that run them, calling thread included. 0 in a child of
    /// `fork()`, where the context cannot be used.
    pub fn threads(&self) -> usize {
        let mut info = sys::zeroed!(dsopt_context_info);
        // SAFETY: the handle lives; any thread may query.
        match check(unsafe { sys::dsopt_context_query(self.inner.handle.as_ptr(), &mut info) }) {
            Ok(()) => usize::try_from(info.threads).unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// Refuses CUDA, for functions with arguments or results in host memory, which is backend memory only on the CPU.
    pub(crate) fn host_only(&self, what: &str) -> Result<()> {
        if self.is_cuda() {
            let text = format!("{what} is host memory, and this context is CUDA: use dsopt-sys with as_ptr()");
            return Err(Error::new(sys::DSOPT_ERR_UNSUPPORTED, text));
        }
        Ok(())
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = out.debug_struct("Context");
        shown.field("cuda", &self.is_cuda()).field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// Options of a [`Context`].
#[must_use = "build() makes the context"]
pub struct ContextBuilder {
    desc: sys::dsopt_context_desc,
    hooks: Hooks,
}

impl fmt::Debug for ContextBuilder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ContextBuilder").field("desc", &self.desc).finish_non_exhaustive()
    }
}

impl ContextBuilder {
    /// Number of work items per step, and of workers that run them. 0, the default: the number of cores.
    pub fn threads(mut self, threads: i32) -> Self {
        self.desc.threads = threads;
        self
    }

    /// Smallest work item in elements, a multiple of 4096.
    pub fn chunk(mut self, elements: i64) -> Self {
        self.desc.chunk = elements;
        self
    }

    /// A thread pool in place of the library's threads.
    ///
    /// The calling thread should run some of the indices: otherwise a pool whose threads all wait inside dsopt
    /// deadlocks. If the pool omits indices, the call returns [`ErrorKind::Hook`](crate::ErrorKind::Hook). A panic of
    /// the pool resumes after the call, whose results are then partly undefined.
    ///
    /// ```
    /// // Two threads for each pass.
    /// let ctx = dsopt::Context::builder()
    ///     .threads(2)
    ///     .parallel_for(|pieces, run| {
    ///         std::thread::scope(|scope| {
    ///             scope.spawn(|| (0..pieces / 2).for_each(run));
    ///             (pieces / 2..pieces).for_each(run);
    ///         })
    ///     })
    ///     .build()?;
    /// # Ok::<(), dsopt::Error>(())
    /// ```
    pub fn parallel_for<F>(mut self, run: F) -> Self
    where
        F: Fn(usize, &(dyn Fn(usize) + Sync)) + Send + Sync + 'static,
    {
        self.hooks.parallel_for = Some(Box::new(run));
        self
    }

    /// Receive log lines. Without this function nothing is ever printed.
    pub fn log<F: Fn(LogLevel, &str) + Send + Sync + 'static>(mut self, log: F) -> Self {
        self.hooks.log = Some(Box::new(log));
        self
    }

    /// Highest level that is logged. The default is the environment's `DSOPT_LOG`, or warnings.
    pub fn log_level(mut self, level: LogLevel) -> Self {
        self.desc.log_level = level as i32;
        self
    }

    /// For debugging on CUDA: each step checks the device of each pointer, and fails with
    /// [`ErrorKind::Device`](crate::ErrorKind::Device) for memory of another device or of the host.
    pub fn check_pointers(mut self) -> Self {
        self.desc.flags |= sys::DSOPT_CONTEXT_CHECK_POINTERS;
        self
    }

    /// The CUDA device of this number, in place of the CPU.
    ///
    /// # Safety
    /// Every tensor and list that is passed to an object of this context is memory of that device, made with
    /// `from_raw_parts`, and stays valid and otherwise unused until the stream has passed the call.
    pub unsafe fn cuda(mut self, device: i32) -> Self {
        self.desc.backend = sys::DSOPT_BACKEND_CUDA;
        self.desc.device = device;
        self
    }

    /// Make the context.
    pub fn build(mut self) -> Result<Context> {
        sys::check_abi().map_err(|reason| Error::new(sys::DSOPT_ERR_MISSING, reason))?;
        if self.hooks.parallel_for.is_some() {
            self.desc.parallel_for = Some(parallel_for);
        }
        if self.hooks.log.is_some() {
            self.desc.log = Some(log);
        }
        let hooks = Box::into_raw(Box::new(self.hooks));
        self.desc.user = hooks.cast();
        let mut handle = ptr::null_mut();
        // SAFETY: the desc and the pointer to the handle are valid, and the hooks live as long as `Inner`.
        let status = unsafe { sys::dsopt_context_create(&self.desc, &mut handle) };
        let cuda = self.desc.backend == sys::DSOPT_BACKEND_CUDA;
        let made = NonNull::new(handle).map(|handle| Context { inner: Arc::new(Inner { handle, cuda, hooks }) });
        if made.is_none() {
            // SAFETY: from Box::into_raw above; there is no context that could call a hook.
            drop(unsafe { Box::from_raw(hooks) });
        }
        owned(status, made)
    }
}

pub(crate) type Body = Option<unsafe extern "C" fn(arg: *mut c_void, i: i64)>;

/// A pointer that other threads of a pool use.
#[derive(Clone, Copy)]
struct Shared(*mut c_void);
// SAFETY: the library passes it to every index, on any thread.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// Runs indices of the library on a pool.
pub(crate) fn run_pieces(pool: &Pool<'_>, n: i64, body: Body, arg: *mut c_void) {
    let shared = Shared(arg);
    if let Some(body) = body {
        // The reference is valid during this call only, so no index can start later.
        pool(usize::try_from(n).unwrap_or(0), &|i| {
            // SAFETY: the library's function and argument. It refuses invalid indices, and second runs.
            unsafe { body(shared.get(), i64::try_from(i).unwrap_or(-1)) };
            panics::resume(); // a panic of a log hook on this thread
        });
    }
}

unsafe extern "C" fn parallel_for(user: *mut c_void, n: i64, body: Body, arg: *mut c_void) {
    panics::catch((), || {
        // SAFETY: `user` is the context's hooks, which outlive every call.
        let hooks = unsafe { &*user.cast::<Hooks>() };
        if let Some(pool) = &hooks.parallel_for {
            run_pieces(pool, n, body, arg);
        }
    })
}

unsafe extern "C" fn log(user: *mut c_void, level: i32, text: *const c_char) {
    panics::catch((), || {
        // SAFETY: `user` is the context's hooks, and the text is a string that is valid during this call.
        let (hooks, text) = unsafe { (&*user.cast::<Hooks>(), CStr::from_ptr(text)) };
        let level = match level {
            sys::DSOPT_LOG_ERROR => LogLevel::Error,
            sys::DSOPT_LOG_WARN => LogLevel::Warn,
            sys::DSOPT_LOG_INFO => LogLevel::Info,
            _ => LogLevel::Trace,
        };
        if let Some(log) = &hooks.log {
            log(level, &text.to_string_lossy());
        }
    })
}
