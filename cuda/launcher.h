// SPDX-License-Identifier: Apache-2.0
// Launches kernels on a stream, and uploads tables to the device.
#pragma once
#include "base/sizes.h"
#include "device/plan.h"
#include "runtime.h"
#include <algorithm>
#include <climits>
#include <cstring>
#include <map>
#include <utility>

namespace dsopt::gpu {

/// Data that all streams of a device share.
class Shared {
public:
    explicit Shared(const Gpu &gpu) : pinned(gpu), scratch(gpu) {
        const OnDevice on(gpu);
        int count = 0;
        check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, gpu.ordinal()), "cudaDeviceGetAttribute");
        multiprocessors_ = unsigned(count);
    }
    /// True if kernels may be launched early. Set once, after all kernels are loaded: only code for capability 9.0 or
    /// more waits for the preceding kernel, see PdlArgument::begin_kernel().
    bool early = false;
    /// Returns the number of resident blocks of a kernel on the device: a second wave would leave most of the device
    /// idle.
    template <class... P> unsigned resident_blocks(void (*kernel)(P...), size_t shared) {
        const std::lock_guard lock(mutex_);
        const std::pair key(reinterpret_cast<const void *>(kernel), shared);
        const auto known = resident_.find(key);
        if (known != resident_.end()) return known->second;
        int blocks = 0;
        // Some kernels are never launched with this much dynamic shared memory: with their static shared memory it
        // exceeds the limit of a block. The query then returns 0 blocks or, with some drivers, an error.
        const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared);
        if (error == cudaErrorInvalidValue) {
            (void)cudaGetLastError();
            blocks = 0;
        } else {
            check(error, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
        }
        return resident_[key] = multiprocessors_ * unsigned(blocks > 1 ? blocks : 1);
    }

    PinnedPool pinned;   // for uploads
    ScratchPool scratch; // for tables that live as long as a call's work

private:
    unsigned multiprocessors_ = 0;
    std::mutex mutex_;
    std::map<std::pair<const void *, size_t>, unsigned> resident_;
};

constexpr int kArgumentWords = 1024; // 8 KiB of kernel arguments
struct Bytes {
    uint64_t words[kArgumentWords];
};

/// Bytes of a leaf's values in dynamic shared memory. Kernels use none, one or two of these.
constexpr size_t kTileBytes = kLeaf * sizeof(float);
/// Number of work items of a kernel, and the dynamic shared memory per block.
struct Work {
    int64_t pieces;
    size_t shared = 0;
    Work(int64_t count, size_t bytes = 0) : pieces(count), shared(bytes) {} // implicit: most kernels have none
};

/// The operation after a kernel in the stream.
enum class Next : uint8_t {
    unknown, // a kernel of the caller or of another call, a collective, a copy, a memset
    kernel,  // a kernel of the same Launcher, which is launched early; events may be in between
};
constexpr Next kernel_if(bool known) { return known ? Next::kernel : Next::unknown; }
/// Name of a kernel, for error texts and tests, and the operation after the kernel.
struct Label {
    const char *name;
    Next next;
    Label(const char *text, Next follows = Next::unknown) : name(text), next(follows) {} // implicit: mostly unknown
};

struct Launcher;
void store_words(uint64_t *to, const Bytes &bytes, int count, const Launcher &launcher);

/// A stream during one call of the engine, with the device current. The loaded code, the position in the call and
/// Label::next determine whether a kernel is launched early, and whether it triggers the next kernel.
struct Launcher {
    OnDevice on;
    Shared &device;
    cudaStream_t stream;
    mutable bool started = false; // a kernel of this call has been launched

    /// Launches as many blocks as are resident, or one per work item if there are fewer.
    template <class... P, class... A>
    void launch_grid(Work work, Label label, void (*kernel)(P...), A &&...arguments) const {
        const int64_t resident = device.resident_blocks(kernel, work.shared);
        const unsigned blocks = unsigned(work.pieces < 1 ? 1 : work.pieces > resident ? resident : work.pieces);
        run(label, kernel, blocks, kThreads, work.shared, std::forward<A>(arguments)...);
    }
    template <class... P, class... A> void launch_block(Label label, void (*kernel)(P...), A &&...arguments) const {
        run(label, kernel, 1, kThreads, 0, std::forward<A>(arguments)...);
    }
    template <class... P, class... A> void launch_thread(Label label, void (*kernel)(P...), A &&...arguments) const {
        run(label, kernel, 1, 1, 0, std::forward<A>(arguments)...);
    }
    void fill(void *to, int value, size_t bytes) const {
        if (bytes != 0) check(cudaMemsetAsync(to, value, bytes, stream), "cudaMemsetAsync");
    }
    /// Uploads host bytes, a multiple of 8: in kernel arguments if they are few, else through page-locked memory. While
    /// the stream is being captured, always in arguments, which the graph keeps.
    void upload(void *to, const void *from, size_t bytes) const {
        PinnedPool::Block block;
        if (bytes > 4 * sizeof(Bytes) && !capturing(stream)) block = device.pinned.take_if_free(bytes);
        if (block.memory) {
            std::memcpy(block.memory.get(), from, bytes);
            check(cudaMemcpyAsync(to, block.memory.get(), bytes, cudaMemcpyHostToDevice, stream), "upload");
            return device.pinned.return_block(std::move(block), stream);
        }
        upload_in_arguments(to, from, bytes);
    }
    /// Uploads the bytes that fill(memory) writes to zeroed memory. Allocates nothing on the heap.
    template <class Fill> void upload(void *to, size_t bytes, const Fill &fill) const {
        if (bytes <= kOnStack) {
            alignas(8) char image[kOnStack];
            std::memset(image, 0, bytes);
            fill(image);
            return upload_in_arguments(to, image, bytes);
        }
        PinnedPool::Block block = device.pinned.take(bytes);
        char *const image = static_cast<char *>(block.memory.get());
        std::memset(image, 0, bytes);
        fill(image);
        check(cudaMemcpyAsync(to, image, bytes, cudaMemcpyHostToDevice, stream), "upload");
        if (capturing(stream)) // a replay reads the block again
            (void)device.pinned.keep(std::move(block));
        else
            device.pinned.return_block(std::move(block), stream);
    }

private:
    static constexpr size_t kOnStack = sizeof(Bytes);
    /// Uploads bytes in kernel arguments.
    void upload_in_arguments(void *to, const void *from, size_t bytes) const {
        for (size_t offset = 0; offset < bytes; offset += sizeof(Bytes)) {
            Bytes piece;
            const size_t piece_bytes = bytes - offset < sizeof piece ? bytes - offset : sizeof piece;
            std::memcpy(piece.words, static_cast<const char *>(from) + offset, piece_bytes);
            store_words(reinterpret_cast<uint64_t *>(static_cast<char *>(to) + offset), piece, int(piece_bytes / 8),
                        *this);
        }
    }
    template <class... P, class... A>
    void run(Label label, void (*kernel)(P...), unsigned blocks, int threads, size_t shared, A &&...arguments) const {
        // The first kernel of a call waits for all work of the caller. After a collective of this call, a kernel may
        // start while the collective runs: begin_kernel() waits for the collective.
        const Pdl pdl{.early = started && device.early, .triggers = label.next == Next::kernel && device.early};
        check(Launch{label.name, blocks, threads, shared, stream}(pdl, kernel, std::forward<A>(arguments)...),
              label.name);
        started = true;
    }
};

/// Throws DSOPT_ERR_MISSING, because the build has no code that the device can run.
[[noreturn]] void refuse_device(const Gpu &gpu);

/// Loads kernels before their first launch, at which the driver may wait for all work on the device, and so for
/// collectives that wait for this rank.
class KernelLoader : NotCopied {
public:
    KernelLoader(const Gpu &gpu, Shared &shared) : gpu_(gpu), shared_(shared) {}
    /// Returns the oldest PTX version of all kernels. The device may have a higher capability: the driver compiles PTX
    /// of an older version for it.
    int ptx() const { return ptx_; }
    template <class... P> void operator()(void (*kernel)(P...)) {
        cudaFuncAttributes attributes;
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error == cudaErrorNoKernelImageForDevice) {
            (void)cudaGetLastError();
            refuse_device(gpu_);
        }
        check(error, "cudaFuncGetAttributes");
        // Queries the occupancy now, for each size of dynamic shared memory, so that a step does not allocate an entry.
        for (const size_t tiles : {0, 1, 2}) (void)shared_.resident_blocks(kernel, tiles * kTileBytes);
        ptx_ = std::min(ptx_, attributes.ptxVersion);
    }
    template <class... Kernels> void operator()(Kernels... kernels) requires(sizeof...(Kernels) > 1) {
        ((*this)(kernels), ...);
    }

private:
    const Gpu &gpu_;
    Shared &shared_;
    int ptx_ = INT_MAX;
};

} // namespace dsopt::gpu
