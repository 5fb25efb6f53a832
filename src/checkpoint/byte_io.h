// SPDX-License-Identifier: Apache-2.0
// Reads and writes a checkpoint's bytes: files, which are replaced as a whole, or the caller's functions.
#pragma once
#include "base/status.h"
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dsopt {

/// Receives bytes in order. If it is destroyed without commit(), it leaves nothing behind.
class Sink {
public:
    virtual ~Sink() = default;
    virtual void begin(uint64_t total) = 0; ///< must be called once, first; `total`: number of bytes to come
    virtual void write(const void *data, size_t bytes) = 0;
    virtual void flush() = 0;  ///< must be called once, after the last write; makes the bytes durable
    virtual void commit() = 0; ///< must be called once, after flush(); makes the bytes visible
    /// False if, after commit(), the bytes are no longer where they were put: another writer has the same target.
    virtual bool is_in_place() const { return true; }
};

/// Random access to bytes.
class Source {
public:
    virtual ~Source() = default;
    virtual uint64_t size() const = 0;
    virtual void read(uint64_t offset, void *data, size_t bytes) const = 0; ///< reads all bytes or throws
};

/// Replaces a file as a whole and durably: a crash at any time leaves the old file or the new file. Errors are
/// DSOPT_ERR_IO with the old file unchanged. The only exception is a failed flush of the directory, after which the new
/// file is in place. The temporary file is ".dsopt-<hash of the name>-<pid>-<counter>.tmp" in the target's directory.
/// The next save of the same target removes temporary files of killed savers.
std::unique_ptr<Sink> file_sink(const char *path);
/// `keep_open` false: each read opens the file again, for loads of more files than a process may have open.
std::unique_ptr<Source> file_source(const char *path, bool keep_open = true);

/// Throws DSOPT_ERR_ARGUMENT unless `path` and the fields of `io` are consistent and its flags are among `known`.
/// `callback`: `io` has the function for this direction.
void check_io(const char *path, const dsopt_io &io, bool callback, uint32_t known);

/// A sink and a source that call the caller's functions; `io` is copied. A result other than 0 is DSOPT_ERR_IO with the
/// number in the text.
std::unique_ptr<Sink> callback_sink(const dsopt_io &io);
std::unique_ptr<Source> callback_source(const dsopt_io &io);

} // namespace dsopt
