// SPDX-License-Identifier: Apache-2.0
// Backend memory to the host and back in pieces of at most 4 MiB, through page-locked memory: one piece is copied while
// the caller works on another.
#pragma once
#include "device/device.h"
#include <optional>

namespace dsopt {

/// Two page-locked buffers, and the copies from or to each of them.
class PinnedPair : NotCopied {
public:
    explicit PinnedPair(const Device &device);
    ~PinnedPair();
    void *buffer(int half) const { return halves_[half].memory.get(); }
    void copy(int half, void *to, const void *from, size_t bytes);
    void wait(int half) const { halves_[half].copies->wait(/*replays=*/false); }

private:
    struct Half {
        HostBuffer memory;
        std::shared_ptr<PendingWork> copies;
    };
    const Device &device_;
    Half halves_[2];
};

/// Backend memory as the host reads it, piece by piece; in place where the backend is the host.
class HostReader {
public:
    explicit HostReader(const Device &device) {
        if (!device.is_host()) pair_.emplace(device);
    }
    /// Returns [from, from + bytes) of an array that goes on for `rest` bytes after it. Valid until the next call.
    const void *view(const void *from, size_t bytes, size_t rest);

private:
    void fetch(const char *from, size_t bytes);
    std::optional<PinnedPair> pair_;
    int next_ = 0;                   // the buffer of the next piece
    const char *expected_ = nullptr; // what has been fetched in advance
    size_t ready_ = 0;
};

/// The other direction, for backends that are not the host: the caller fills one buffer while the other is copied.
class HostWriter {
public:
    explicit HostWriter(const Device &device) : pair_(device) {}
    /// Returns memory for the next piece.
    void *buffer();
    /// Copies what is in the buffer to `to`.
    void write(void *to, size_t bytes);
    /// Returns when all copies are done.
    void finish() const;

private:
    PinnedPair pair_;
    int next_ = 0;
};

} // namespace dsopt
