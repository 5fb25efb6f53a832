// SPDX-License-Identifier: Apache-2.0
// Copies between backend memory and the host in pieces of at most 4 MiB, double-buffered in page-locked memory: one
// piece is copied while the caller processes another.
#pragma once
#include "device/device.h"
#include <optional>

namespace dsopt {

/// Two page-locked buffers, and the pending copies from or to each buffer.
class PinnedPair : NotCopied {
public:
    explicit PinnedPair(const Device &device);
    ~PinnedPair();
    void *buffer(int half) const { return halves_[half].memory.get(); }
    void copy(int half, void *to, const void *from, size_t bytes);
    void wait(int half) const { halves_[half].copies->wait(PendingWork::Waits::host); }

private:
    struct Half {
        HostBuffer memory;
        std::shared_ptr<PendingWork> copies;
    };
    const Device &device_;
    Half halves_[2];
};

/// Reads backend memory on the host, piece by piece; in place if the backend is the host.
class HostReader {
public:
    explicit HostReader(const Device &device) {
        if (!device.is_host()) pair_.emplace(device);
    }
    /// Returns [from, from + bytes) of an array that has `rest` bytes after it. Valid until the next call.
    const void *view(const void *from, size_t bytes, size_t rest);

private:
    void fetch(const char *from, size_t bytes);
    std::optional<PinnedPair> pair_;
    int next_ = 0;                   // index of the buffer for the next piece
    const char *expected_ = nullptr; // start of the piece that has been copied in advance
    size_t ready_ = 0;
};

/// Writes backend memory on backends that are not the host: the caller fills one buffer while the other is copied.
class HostWriter {
public:
    explicit HostWriter(const Device &device) : pair_(device) {}
    /// Returns memory for the next piece.
    void *buffer();
    /// Copies the buffer to `to`.
    void write(void *to, size_t bytes);
    /// Returns when all copies are done.
    void finish() const;

private:
    PinnedPair pair_;
    int next_ = 0;
};

} // namespace dsopt
