// SPDX-License-Identifier: Apache-2.0
// Device memory to the host and back in pieces, through page-locked memory: one is on its way while the caller works on
// another.
#pragma once
#include "device/device.h"
#include "runtime.h"

namespace dsopt::gpu {

/// Two page-locked buffers on a stream of their own.
class PinnedPair : NotCopied {
public:
    explicit PinnedPair(const Gpu &gpu) : gpu_(gpu), stream_(gpu.stream()) {
        for (Half &half : halves_) half = {gpu.pinned_memory(kPiece), gpu.event(cudaEventDisableTiming)};
    }
    ~PinnedPair() {
        try {
            const OnDevice on(gpu_);
            (void)cudaStreamSynchronize(stream_.get());
        } catch (const std::exception &) {} // the device is lost
    }

    void *buffer(int half) const { return halves_[half].memory.get(); }
    void copy(int half, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
        const OnDevice on(gpu_);
        check(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()), "cudaMemcpyAsync");
        check(cudaEventRecord(halves_[half].copied.get(), stream_.get()), "cudaEventRecord");
    }
    void wait(int half) const {
        const OnDevice on(gpu_);
        check(cudaEventSynchronize(halves_[half].copied.get()), "cudaEventSynchronize");
    }

private:
    struct Half {
        PinnedMemory memory;
        Event copied;
    };
    const Gpu &gpu_;
    Stream stream_;
    Half halves_[2];
};

class PinnedReader final : public HostReader {
public:
    explicit PinnedReader(const Gpu &gpu) : pair_(gpu) {}
    const void *view(const void *from, size_t bytes, size_t rest) override {
        const char *begin = static_cast<const char *>(from);
        if (begin != expected_ || bytes != ready_) fetch(begin, bytes);
        const int here = next_;
        pair_.wait(here);
        next_ = 1 - next_;
        expected_ = nullptr;
        if (rest != 0) fetch(begin + bytes, rest < kPiece ? rest : kPiece);
        return pair_.buffer(here);
    }

private:
    void fetch(const char *from, size_t bytes) {
        pair_.copy(next_, pair_.buffer(next_), from, bytes, cudaMemcpyDeviceToHost);
        expected_ = from;
        ready_ = bytes;
    }
    PinnedPair pair_;
    int next_ = 0;                   // where the next piece goes, or is
    const char *expected_ = nullptr; // what has been fetched ahead
    size_t ready_ = 0;
};

class PinnedWriter final : public HostWriter {
public:
    explicit PinnedWriter(const Gpu &gpu) : pair_(gpu) {}
    void *buffer() override {
        if (used_[next_]) pair_.wait(next_);
        return pair_.buffer(next_);
    }
    void write(void *to, size_t bytes) override {
        pair_.copy(next_, to, pair_.buffer(next_), bytes, cudaMemcpyHostToDevice);
        used_[next_] = true;
        next_ = 1 - next_;
    }
    void finish() override {
        for (int half = 0; half < 2; ++half)
            if (used_[half]) pair_.wait(half);
    }

private:
    PinnedPair pair_;
    int next_ = 0;
    bool used_[2] = {};
};

} // namespace dsopt::gpu
