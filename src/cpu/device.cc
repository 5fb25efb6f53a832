// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"
#include "cpu/compress.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/matrix_step.h"
#include "cpu/partition.h"
#include "cpu/prefetch.h"
#include "cpu/step.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <vector>

namespace dsopt {
namespace {

using cpu::Kernels;
using cpu::ListPartition;

const Kernels &choose_kernels() {
#if defined(__x86_64__)
    switch (cpu::chosen_isa()) {
    case cpu::Isa::generic: break;
    case cpu::Isa::avx2: return cpu::kernels_avx2;
    case cpu::Isa::avx512: return cpu::kernels_avx512;
    case cpu::Isa::avx512_bf16: return cpu::kernels_avx512_bf16;
    }
#endif
    return cpu::kernels_generic;
}

class CpuKernels final : public DeviceKernels {
public:
    size_t device_workspace_bytes(const StepShape &shape) const override {
        return cpu::StepPartition::device_workspace_bytes(shape);
    }
    std::unique_ptr<StepCache> make_cache() const override { return std::make_unique<cpu::PrefetchTrial>(); }
    void check_matrices() const override {}
    MatrixSizes matrix_sizes(const MatrixBatch &batch, int threads) const override {
        const MatrixShape &shape = batch.shape;
        return {cpu::MatrixMemory(batch, nullptr).bytes,
                size_t(cpu::ns_scratch_bytes(products_, shape.n(), shape.m(), batch.count, threads))};
    }
    void run_step(const StepPlan &plan, FunctionRef<void(StepKernels &)> body) const override {
        cpu::run_step(plan, kernels_, products_, caches_, body);
    }
    void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                      const Parallel &parallel, void *) const override {
        const ListPartition partition(x, count, parallel);
        std::visit([&](const auto &operation) { apply(operation, partition, x, y); }, op);
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
              dsopt_norm_result *result, const Parallel &parallel, void *) const override {
        std::vector<int64_t> first(size_t(count) + 1);
        for (int64_t i = 0; i < count; ++i)
            first[size_t(i) + 1] = first[size_t(i)] + (list[i].data != nullptr ? leaves_of(list[i].numel) : 0);
        const auto leaves = size_t(first[size_t(count)]);
        std::vector<double> squares(leaves);
        std::vector<int64_t> bad(leaves);
        std::vector<float> largest(leaves);
        ListPartition(list, count, parallel).run([&](int64_t i, int64_t begin, int64_t end) {
            kernels_.inspect(slot_of(list[i]), begin, end, squares.data(), bad.data(),
                             kind == DSOPT_NORM_MAX ? largest.data() : nullptr, first[size_t(i)] + begin / kLeaf);
        });
        NonFinite found;
        double max = 0;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t leaf = first[size_t(i)]; leaf < first[size_t(i) + 1]; ++leaf) {
                found.add(i, bad[size_t(leaf)] & 0xffff, false);
                max = larger_factor(max, double(largest[size_t(leaf)]));
            }
        const double total = add_in_lanes(count, [&](int64_t i) {
            const int64_t begin = first[size_t(i)];
            return add_in_lanes(first[size_t(i) + 1] - begin,
                                [&](int64_t leaf) { return squares[size_t(begin + leaf)]; });
        });
        *result = norm_result(kind, raw, total, max, found, max_norm);
    }
    void run_in_one_thread(const OneThreadFunction &function, void *) const override {
        std::visit([](const auto &call) { call(); }, function);
    }
    void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t, const Parallel &parallel, void *,
                      FunctionRef<void(ExchangeKernels &)> body) const override {
        cpu::ExchangeRun run(kernels_.onebit, parallel, buffers, list, caches_.last);
        body(run);
    }

private:
    static void apply(const Zero &, const ListPartition &partition, const dsopt_tensor *, const dsopt_tensor *y) {
        partition.run([&](int64_t i, int64_t begin, int64_t end) {
            const size_t size = dtype_size(y[i].dtype);
            std::memset(static_cast<char *>(y[i].data) + size_t(begin) * size, 0, size_t(end - begin) * size);
        });
    }
    void apply(const Axpby &op, const ListPartition &partition, const dsopt_tensor *x, const dsopt_tensor *y) const {
        const float factor = op.a.data != nullptr ? *op.a.data : op.a.value; // read once: it may be an element of y
        partition.run([&](int64_t i, int64_t begin, int64_t end) {
            if (y[i].data != nullptr) kernels_.axpby(factor, x[i], op.b, y[i], begin, end);
        });
    }
    static void apply(const Copy &, const ListPartition &partition, const dsopt_tensor *x, const dsopt_tensor *y) {
        partition.run([&](int64_t i, int64_t begin, int64_t end) {
            const size_t size = dtype_size(y[i].dtype), offset = size_t(begin) * size;
            std::memcpy(static_cast<char *>(y[i].data) + offset, static_cast<const char *>(x[i].data) + offset,
                        size_t(end - begin) * size);
        });
    }
    void apply(const SumRows &op, const ListPartition &partition, const dsopt_tensor *x, const dsopt_tensor *y) const {
        partition.run([&](int64_t i, int64_t begin, int64_t end) {
            for (int64_t leaf = begin; leaf < end; leaf += kLeaf) { // the sums stay in the cache
                const int64_t last = std::min(leaf + kLeaf, end);
                dsopt_tensor row = x[i];
                for (int k = 0; k < op.count; ++k) {
                    kernels_.axpby(1, row, k == 0 ? 0.0f : 1.0f, y[i], leaf, last);
                    row.data = static_cast<char *>(row.data) + op.stride;
                }
                if (op.share != 1) kernels_.axpby(op.share, y[i], 0, y[i], leaf, last);
            }
        });
    }
    void apply(const Clamp &op, const ListPartition &partition, const dsopt_tensor *, const dsopt_tensor *y) const {
        partition.run([&](int64_t i, int64_t begin, int64_t end) { kernels_.clamp(y[i], op.limit, begin, end); });
    }

    const Kernels &kernels_ = choose_kernels();
    const cpu::Products &products_ = cpu::choose_products();
    const cpu::CacheSizes caches_ = cpu::cache_sizes();
};

class CpuDevice final : public Device {
public:
    CpuDevice() : Device("cpu", true, kernels_) {}
    void *allocate(size_t bytes, void *) const override {
        // Blocks of 2 MiB and more use whole huge pages: a step is bound by memory, and small pages make it a fifth
        // slower.
        constexpr size_t huge = size_t(2) << 20;
        const size_t alignment = bytes >= huge ? huge : 64;
        if (bytes > SIZE_MAX - huge) throw std::bad_alloc();
        const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        void *memory = std::aligned_alloc(alignment, std::max(rounded, alignment));
        if (memory == nullptr) throw Error(DSOPT_ERR_NOMEM, "out of host memory: %zu bytes of optimizer state", bytes);
        if (bytes >= huge) (void)madvise(memory, rounded, MADV_HUGEPAGE);
        return memory;
    }
    void release(void *memory, size_t, void *) const noexcept override { std::free(memory); }

    bool owns(const void *) const override { return true; }
    HostBuffer host_buffer(size_t) const override { return {}; }

    void clear(void *data, size_t bytes, void *) const override {
        if (bytes != 0) std::memset(data, 0, bytes); // an empty tensor may have no address
    }
    void *copy_stream() const override { return nullptr; }
    void enqueue_copy(void *to, const void *from, size_t bytes, void *) const override {
        if (bytes != 0) std::memmove(to, from, bytes);
    }
    void check_stream(void *) const override {}
    std::shared_ptr<PendingWork> make_pending_work() const override { return nullptr; }
    bool finished(void *) const override { return true; }
    void wait(void *) const override {}
    void on_device(FunctionRef<void()> body) const override { body(); }

private:
    CpuKernels kernels_;
};

} // namespace

const char *cpu_isa_name() { return choose_kernels().name; }
const char *unknown_isa() { return cpu::unknown_isa(); }
std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

} // namespace dsopt
