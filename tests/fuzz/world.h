// SPDX-License-Identifier: Apache-2.0
// The objects of one sequence of calls, their memory, and arguments to choose from.
#pragma once
#include "harness.h"
#include "support/memory.h"
#include <array>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>

namespace fuzz {

using test::Block;

constexpr size_t kMaxBytes = size_t(64) << 20; // of one allocation
constexpr int64_t kMaxNumel = 100000;          // of a tensor that has memory

constexpr int64_t kSizes[] = {0, 1, 2, 3, 5, 7, 17, 31, 32, 33, 64, 100, 255, 256, 1000, 4095, 4096, 4097};
constexpr int64_t kBadSizes[] = {-1,
                                 INT64_MAX,
                                 INT64_MIN,
                                 int64_t(1) << 62,
                                 int64_t(1) << 61,
                                 (int64_t(1) << 60) + 1,
                                 int64_t(1) << 56,
                                 int64_t(1) << 40,
                                 int64_t(1) << 32,
                                 (int64_t(1) << 31) + 17};
constexpr int32_t kIntegers[] = {0, 1, 2, 3, 4, 5, 7, 16, 33, -1, INT32_MAX, INT32_MIN};
constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
constexpr uint32_t kWords[] = {0,          1,          2,          3,          0xffffffff, 0x7fffffff, 0x80000000,
                               0x7fc00000, 0x7f800000, 0xff800000, 0x3f800000, 0x7f7fffff, 0x40000000, 0xbf000000};
constexpr double kNumbers[] = {0, 1, 0.5, 1e-3, 0.9, 0.999, 2, 3, 1e-8, 1e-320, 1e300, 65536};
constexpr double kBadNumbers[] = {-1,
                                  std::numeric_limits<double>::quiet_NaN(),
                                  std::numeric_limits<double>::infinity(),
                                  -std::numeric_limits<double>::infinity(),
                                  1.0000001,
                                  4e9,
                                  1e308,
                                  -1e-320};
constexpr int32_t kAlgorithms[] = {
    DSOPT_ALGORITHM_ADAM,          DSOPT_ALGORITHM_ADAMW,       DSOPT_ALGORITHM_LAMB,       DSOPT_ALGORITHM_ADAM_LEGACY,
    DSOPT_ALGORITHM_SGD,           DSOPT_ALGORITHM_ADAGRAD,     DSOPT_ALGORITHM_LION,       DSOPT_ALGORITHM_ONEBIT_ADAM,
    DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM};
constexpr const char *kNames[] = {"a", "b", "a.b", "\xff", "", "\u00fc", "optimizer", "a\"\\\n"};

/// The allocator hook of a context, in backend memory: counts allocations and fails after a chosen number of them.
struct Hook {
    Hook(const test::Memory &from, int32_t kind) : memory(from), backend(kind) {}
    const test::Memory &memory;
    const int32_t backend;
    int64_t fails_in = -1; // calls until one fails; -1: none fails
    int64_t live = 0;
    static void *allocate(void *self, size_t bytes, size_t alignment, void *stream);
    static void release(void *self, void *memory, size_t bytes, void *stream);
};

/// An optimizer and what the fuzzer knows about it.
struct OptimizerRecord {
    test::Optimizer handle;
    Hook *hook = nullptr;
    int32_t flags = 0, compat = 0, masters = 0;
    size_t groups = 0;
    bool has_formats = false, has_matrices = false; // in a group
    std::vector<dsopt_tensor> params;
    /// True if it has a parameter that is too large to have memory.
    bool is_large() const {
        return std::any_of(params.begin(), params.end(), [](const dsopt_tensor &t) { return t.numel > kMaxNumel; });
    }
};

/// Lists that live as long as the step that refers to them.
struct StepLists {
    std::vector<dsopt_tensor> gradients, params, out, state;
};

class World {
public:
    explicit World(Choices choices);
    ~World();
    World(const World &) = delete;
    World &operator=(const World &) = delete;

protected:
    struct OwnContext {
        test::Context handle;
        Hook *hook;
    };
    Choices choose;
    const int32_t backend;
    const test::Memory memory;
    std::deque<Block> blocks; // all memory passed to calls
    std::vector<std::unique_ptr<Hook>> hooks;
    std::vector<std::unique_ptr<Echo>> echoes;
    std::vector<OwnContext> contexts;
    std::vector<test::Comm> comms;
    std::vector<test::Scaler> scalers;
    std::vector<OptimizerRecord> optimizers;
    std::vector<test::Optimizer> retained;
    std::vector<Bytes> files;
    int64_t described = 0; // by describe_state()

    // ------------------------------------------------------------------------------------------------------- arguments
    double number() { return choose.rarely(8) ? choose.of(kBadNumbers) : choose.of(kNumbers); }
    template <class T> size_t index_of(const std::vector<T> &list) { return choose.byte() % list.size(); }
    dsopt_context *any_context() {
        return contexts.empty() || choose.rarely(32) ? nullptr : contexts[index_of(contexts)].handle.get();
    }
    dsopt_comm *any_comm() { return comms.empty() || choose.below(3) == 0 ? nullptr : comms[index_of(comms)].get(); }
    OptimizerRecord *any_optimizer() { return optimizers.empty() ? nullptr : &optimizers[index_of(optimizers)]; }
    void break_one(std::initializer_list<int32_t *> values) {
        *values.begin()[choose.byte() % values.size()] = choose.of(kIntegers);
    }
    template <class T> static int64_t count_of(const std::vector<T> &list) { return int64_t(list.size()); }
    static void run_backwards(void *, int64_t count, void (*body)(void *, int64_t), void *arg) {
        while (count-- > 0) body(arg, count);
    }
    std::string path(int index);

    // ---------------------------------------------------------------------------------------------------------- memory
    void *allocate(size_t bytes);
    void *zeros(size_t bytes);
    void *words(std::initializer_list<int32_t> values);
    void *floats(size_t count);
    /// Returns a block that the caller owns, for a rank.
    Block block(size_t bytes) const;
    dsopt_tensor tensor(int64_t numel, int32_t dtype);
    /// Makes an entry invalid; its memory is never accessed.
    void make_invalid(dsopt_tensor &tensor);
    void fill_words(const dsopt_tensor &tensor);
    static size_t bytes_of(const dsopt_tensor &tensor) { return size_t(tensor.numel) * size_of(tensor.dtype); }
    /// Returns a list as long as the optimizer's parameters, with occasional errors.
    std::vector<dsopt_tensor> list_like(const OptimizerRecord &o, bool as_params);
    /// Returns a list of new memory for all state of the optimizer, with the current values or zeros. Empty if there is
    /// too much state.
    std::vector<dsopt_tensor> state_list(const OptimizerRecord &o, bool with_values);
    bool describe_state(const OptimizerRecord &o, dsopt_state_info &info);

    // ------------------------------------------------------------------------------------------------------ invariants
    /// Calls call(), then then() on success. On failure the optimizer must not have changed.
    void watch(
        OptimizerRecord &o, const char *name, const std::function<dsopt_status()> &call,
        const std::function<void()> &then = [] {});
    static void added(OptimizerRecord &o, const std::vector<dsopt_tensor> &params, bool group);
    template <class T> void erase_one(std::vector<T> &list) {
        if (!list.empty()) list.erase(list.begin() + long(index_of(list)));
    }
    /// Releases in an order that the input chooses. No memory that the engine allocated may be left.
    void release_all();

private:
    Bytes snapshot(OptimizerRecord &o);
    std::string folder_; // created when first needed
};

} // namespace fuzz
