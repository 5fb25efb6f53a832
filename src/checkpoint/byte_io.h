// SPDX-License-Identifier: Apache-2.0
// Where a checkpoint's bytes go and come from: files, replaced as a whole, and the caller's functions.
#pragma once
#include "base/status.h"
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dsopt {

/// Takes bytes in order. Destroyed without commit() it leaves nothing behind.
class Sink {
public:
    virtual ~Sink() = default;
    virtual void begin(uint64_t total) = 0; ///< once, first: how many bytes will come
    virtual void write(const void *data, size_t bytes) = 0;
    virtual void commit() = 0; ///< once, last: makes what was written visible and durable
};

/// Gives bytes from anywhere.
class Source {
public:
    virtual ~Source() = default;
    virtual uint64_t size() const = 0;
    virtual void read(uint64_t offset, void *data, size_t bytes) const = 0; ///< all of them, or throws
};

/// Replaces a file, as a whole and durably: a crash at any time leaves the old file or the new one. Errors are
/// DSOPT_ERR_IO with the old file untouched; the one exception is a failing flush of the directory, after which the new
/// file is in place. The temporary is ".dsopt-<hash of the name>-<pid>-<counter>.tmp" beside the target; what killed
/// savers left of these is removed at the next save of the same target.
std::unique_ptr<Sink> file_sink(const char *path);
std::unique_ptr<Source> file_source(const char *path);

/// Throws DSOPT_ERR_ARGUMENT unless a path and what the caller set in `io` go together and its flags are among `known`.
/// `callback`: it has the function for this direction.
void check_io(const char *path, const dsopt_io &io, bool callback, uint32_t known);

/// The caller's functions; `io` is copied. A return other than 0 is DSOPT_ERR_IO naming the number.
std::unique_ptr<Sink> callback_sink(const dsopt_io &io);
std::unique_ptr<Source> callback_source(const dsopt_io &io);

} // namespace dsopt
