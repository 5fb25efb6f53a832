// SPDX-License-Identifier: Apache-2.0
use crate::error::check;
use crate::optimizer::Optimizer;
use crate::{panics, sys, Error, Result, TensorMut, TensorRef};
use std::ffi::{c_void, CString};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::raw::c_int;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{ptr, slice};

/// What a load changes, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Keep moments, counters, schedule and error feedback.
    pub keep_state: bool,
    /// Copy masters from the parameters, not from the file.
    pub keep_masters: bool,
    /// Keep the current hyper-parameters.
    pub keep_hyper: bool,
    /// Keep the loss scale and its counters.
    pub keep_scaler: bool,
    /// Do not read the parameters. Those that are passed are only used for masters: to copy masters from them, or with
    /// [`remainder_masters`](crate::OptimizerBuilder::remainder_masters) to write to them.
    pub keep_params: bool,
    /// Reset error feedback of the 1-bit family.
    pub reset_errors: bool,
    /// Convert moments that were saved in another format. Otherwise they are refused.
    pub convert: bool,
}

impl LoadOptions {
    fn flags(self) -> i32 {
        [
            (self.keep_state, sys::DSOPT_IO_NO_STATE),
            (self.keep_masters, sys::DSOPT_IO_NO_MASTERS),
            (self.keep_hyper, sys::DSOPT_IO_NO_HYPER),
            (self.keep_scaler, sys::DSOPT_IO_NO_SCALER),
            (self.reset_errors, sys::DSOPT_IO_RESET_ERRORS),
            (self.convert, sys::DSOPT_IO_CONVERT),
        ]
        .iter()
        .fold(0, |flags, &(set, flag)| if set { flags | flag } else { flags })
    }
}

/// A path for C.
fn path_of(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::argument(format!("the path {} has a NUL in it", path.display())))
}

/// A writer or reader of the caller, and its first error.
struct Stream<T> {
    stream: T,
    error: Option<io::Error>,
}

impl<T> Stream<T> {
    fn new(stream: T) -> Stream<T> {
        Stream { stream, error: None }
    }

    /// Run one read or write: 0, or the system's number of the error.
    fn run(&mut self, call: impl FnOnce(&mut T) -> io::Result<()>) -> c_int {
        const EIO: c_int = 5;
        panics::catch(EIO, || match call(&mut self.stream) {
            Ok(()) => 0,
            Err(error) => {
                let number = error.raw_os_error().filter(|&number| number != 0).unwrap_or(EIO);
                self.error.get_or_insert(error);
                number
            }
        })
    }
}

unsafe extern "C" fn write<W: Write>(user: *mut c_void, data: *const c_void, bytes: usize) -> c_int {
    // SAFETY: `user` is the stream of the call that is running, which no other thread uses.
    let stream = unsafe { &mut *user.cast::<Stream<W>>() };
    // SAFETY: `data` has `bytes` bytes, unless there are none.
    let data = if bytes == 0 { &[] } else { unsafe { slice::from_raw_parts(data.cast::<u8>(), bytes) } };
    stream.run(|writer| writer.write_all(data))
}

unsafe extern "C" fn read<R: Read + Seek>(user: *mut c_void, offset: u64, data: *mut c_void, bytes: usize) -> c_int {
    if bytes == 0 {
        return 0;
    }
    // SAFETY: `user` is the stream of the call that is running, which no other thread uses.
    let stream = unsafe { &mut *user.cast::<Stream<R>>() };
    // SAFETY: `data` has `bytes` bytes, which are zeroed before a reader receives them.
    let data = unsafe {
        ptr::write_bytes(data.cast::<u8>(), 0, bytes);
        slice::from_raw_parts_mut(data.cast::<u8>(), bytes)
    };
    stream.run(|reader| {
        reader.seek(SeekFrom::Start(offset))?;
        reader.read_exact(data)
    })
}

impl Optimizer {
    /// Write a checkpoint: a safetensors file, under a temporary name until it is complete. With a data comm
    /// each rank writes one file. With [`remainder_masters`](crate::OptimizerBuilder::remainder_masters) the parameters
    /// are needed: [`Optimizer::save_params`].
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.save_params(path, &[])
    }

    /// As [`Optimizer::save`], with the parameters.
    pub fn save_params(&mut self, path: impl AsRef<Path>, params: &[TensorRef<'_>]) -> Result<()> {
        let path = path_of(path.as_ref())?;
        let mut io = sys::zeroed!(dsopt_io);
        io.flags = with_params(params.is_empty());
        self.with_params(params, |opt| {
            // SAFETY: path and struct outlive the call; bound parameters are borrowed.
            check(unsafe { sys::dsopt_optimizer_save(opt, path.as_ptr(), &io) })
        })
    }

    /// Write a checkpoint to a stream, with the parameters unless the list is empty. The stream is not flushed.
    pub fn save_to<W: Write>(&mut self, writer: W, params: &[TensorRef<'_>]) -> Result<()> {
        let mut stream = Stream::new(writer);
        let mut io = sys::zeroed!(dsopt_io);
        io.flags = with_params(params.is_empty());
        io.user = (&mut stream as *mut Stream<W>).cast();
        io.write = Some(write::<W>);
        self.with_params(params, |opt| {
            // SAFETY: stream and struct outlive the call; bound parameters are borrowed.
            check(unsafe { sys::dsopt_optimizer_save(opt, ptr::null(), &io) })
        })
        .map_err(|error| error.with_source(stream.error.take()))
    }

    /// Read a checkpoint without parameters; parameters in the file are ignored. Everything is checked before anything
    /// changes. For masters that are copied from parameters, or that are parts of them, use [`Optimizer::load_files`].
    pub fn load(&mut self, path: impl AsRef<Path>, options: LoadOptions) -> Result<()> {
        self.load_files(&[path], options, &mut [])
    }

    /// Read a checkpoint that was saved by this or another number of ranks: one path per rank that saved. Parameters in
    /// the list are read as well, unless [`LoadOptions::keep_params`] is set.
    pub fn load_files<P: AsRef<Path>>(
        &mut self,
        paths: &[P],
        options: LoadOptions,
        params: &mut [TensorMut<'_>],
    ) -> Result<()> {
        let paths: Vec<CString> = paths.iter().map(|path| path_of(path.as_ref())).collect::<Result<_>>()?;
        let pointers: Vec<_> = paths.iter().map(|path| path.as_ptr()).collect();
        let mut io = sys::zeroed!(dsopt_io);
        io.flags = options.flags() | with_params(options.keep_params || params.is_empty());
        let mut only = ptr::null();
        match pointers.as_slice() {
            [] => return Err(Error::argument("load_files: no paths")),
            [path] => only = *path,
            _ => {
                io.files = length(pointers.len())?;
                io.paths = pointers.as_ptr();
            }
        }
        self.with_params_mut(params, |opt| {
            // SAFETY: paths and struct outlive the call; bound parameters are borrowed mutably.
            check(unsafe { sys::dsopt_optimizer_load(opt, only, &io) })
        })
    }

    /// Read a checkpoint from one stream per rank that saved. As [`Optimizer::load_files`].
    pub fn load_from<R: Read + Seek>(
        &mut self,
        readers: &mut [R],
        options: LoadOptions,
        params: &mut [TensorMut<'_>],
    ) -> Result<()> {
        let mut io = sys::zeroed!(dsopt_io);
        io.flags = options.flags() | with_params(options.keep_params || params.is_empty());
        let mut totals = Vec::new();
        for reader in readers.iter_mut() {
            let end = reader.seek(SeekFrom::End(0));
            totals
                .push(end.map_err(|error| Error::new(sys::DSOPT_ERR_IO, error.to_string()).with_source(Some(error)))?);
        }
        let mut streams: Vec<Stream<&mut R>> = readers.iter_mut().map(Stream::new).collect();
        let base = streams.as_mut_ptr();
        // SAFETY: indices of the vector.
        let users: Vec<*mut c_void> = (0..totals.len()).map(|index| unsafe { base.add(index) }.cast()).collect();
        io.read = Some(read::<&mut R>);
        match (users.as_slice(), totals.as_slice()) {
            ([], _) => return Err(Error::argument("load_from: no readers")),
            ([user], [total]) => {
                io.user = *user;
                io.total = *total;
            }
            _ => {
                io.files = length(users.len())?;
                io.users = users.as_ptr();
                io.totals = totals.as_ptr();
            }
        }
        self.with_params_mut(params, |opt| {
            // SAFETY: streams and struct outlive the call; bound parameters are borrowed mutably.
            check(unsafe { sys::dsopt_optimizer_load(opt, ptr::null(), &io) })
        })
        .map_err(|error| error.with_source(streams.iter_mut().find_map(|stream| stream.error.take())))
    }
}

fn with_params(none: bool) -> i32 {
    if none {
        0
    } else {
        sys::DSOPT_IO_PARAMS
    }
}

fn length(files: usize) -> Result<i32> {
    i32::try_from(files).map_err(|_| Error::argument(format!("{files} files are too many")))
}
