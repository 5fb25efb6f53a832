// SPDX-License-Identifier: Apache-2.0
// What the tests through the C header share: handles that release themselves, memory with known contents, bits as text.
#pragma once
#include "dsopt.h"
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace test {

/// For calls that must succeed where no assertion can be written; GoogleTest reports the exception.
inline void check(dsopt_status status) {
    if (status != DSOPT_OK)
        throw std::runtime_error(std::string(dsopt_status_name(status)) + ": " + dsopt_last_error());
}
#define EXPECT_OK(call) EXPECT_EQ(dsopt_status(DSOPT_OK), (call)) << dsopt_last_error()
#define ASSERT_OK(call) ASSERT_EQ(dsopt_status(DSOPT_OK), (call)) << dsopt_last_error()

/// The status, and a text that has every one of `words`, separated by '|'.
inline testing::AssertionResult refused(dsopt_status got, dsopt_status wanted, const std::string &words) {
    const std::string text = dsopt_last_error();
    if (got != wanted)
        return testing::AssertionFailure()
               << dsopt_status_name(got) << " in place of " << dsopt_status_name(wanted) << ", last error: " << text;
    for (size_t begin = 0, end = 0; begin <= words.size(); begin = end + 1) {
        end = std::min(words.find('|', begin), words.size());
        const std::string word = words.substr(begin, end - begin);
        if (text.find(word) == std::string::npos)
            return testing::AssertionFailure() << "'" << word << "' is not in: " << text;
    }
    return testing::AssertionSuccess();
}

/// Equality of long byte strings without printing them.
inline testing::AssertionResult same(const std::string &a, const std::string &b) {
    if (a == b) return testing::AssertionSuccess();
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " bytes and " << b.size();
    size_t i = 0, different = 0;
    while (a[i] == b[i]) ++i;
    for (size_t k = i; k < a.size(); ++k) different += a[k] != b[k];
    return testing::AssertionFailure() << different << " of " << a.size() << " bytes differ, first at " << i;
}

/// splitmix64: the same numbers on every machine.
class Random {
public:
    explicit Random(uint64_t seed = 1) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t n) { return next() % n; }
    /// Sign and fraction uniform, binary exponent uniform in [low, high].
    float number(int low, int high) {
        const uint64_t r = next();
        const double fraction = 1 + double(r & 0x7fffffu) / 0x800000;
        return float(std::ldexp(r >> 63 ? -fraction : fraction, low + int((r >> 32) % uint64_t(high - low + 1))));
    }

private:
    uint64_t state_;
};

// ------------------------------------------------------------------------------------------------------ storage types
inline size_t size_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_F64: return 8;
    case DSOPT_DTYPE_F32:
    case DSOPT_DTYPE_I32: return 4;
    }
    return 2;
}
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// The value of a 16-bit pattern, from the definition of the format.
inline float widened(uint16_t bits, int32_t dtype) {
    const int fraction_bits = dtype == DSOPT_DTYPE_F16 ? 10 : 7, exponent_bits = 15 - fraction_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1, exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits >> 15 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1)
        return fraction ? std::nanf("") : float(sign * std::numeric_limits<double>::infinity());
    if (exponent == 0) return float(sign * std::ldexp(fraction, 1 - bias - fraction_bits));
    return float(sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits));
}

/// The nearest 16-bit pattern, ties to even, by arithmetic in double. A NaN keeps sign and upper payload and becomes
/// quiet.
inline uint16_t narrowed(float value, int32_t dtype) {
    const int fraction_bits = dtype == DSOPT_DTYPE_F16 ? 10 : 7, exponent_bits = 15 - fraction_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1, special = (1 << exponent_bits) - 1;
    const int sign = int(bits_of(value) >> 31) << 15;
    if (std::isnan(value)) {
        const int payload = int(bits_of(value) >> (23 - fraction_bits)) & ((1 << fraction_bits) - 1);
        return uint16_t(sign | special << fraction_bits | 1 << (fraction_bits - 1) | payload);
    }
    const double x = std::fabs(double(value));
    if (x == 0) return uint16_t(sign);
    if (std::isinf(x)) return uint16_t(sign | special << fraction_bits);
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    // In units of the last place; a carry into the next binade or from the subnormals is what the addition below makes
    // of it.
    const auto units = int64_t(std::nearbyint(std::ldexp(x, fraction_bits - exponent)));
    const int64_t magnitude = (int64_t(exponent + bias - 1) << fraction_bits) + units;
    return uint16_t(sign | std::min(magnitude, int64_t(special) << fraction_bits));
}

// ------------------------------------------------------------------------------------------------------------- memory
/// An array that begins `offset` bytes behind a 64-byte line, between two stretches of bytes that nobody may write.
class Buffer {
public:
    Buffer(int64_t numel, int32_t dtype, size_t offset = 0) :
        numel_(numel),
        dtype_(dtype),
        begin_(kLine + offset),
        memory_(static_cast<char *>(std::aligned_alloc(kLine, (begin_ + bytes() + 2 * kLine) / kLine * kLine))) {
        std::memset(memory_.get(), kGuard, begin_);
        std::memset(data(), 0, bytes());
        std::memset(memory_.get() + begin_ + bytes(), kGuard, tail());
    }
    char *data() const { return memory_.get() + begin_; }
    template <class T> T *as() const { return reinterpret_cast<T *>(data()); }
    float *floats() const { return as<float>(); }
    int64_t numel() const { return numel_; }
    int32_t dtype() const { return dtype_; }
    size_t bytes() const { return size_t(numel_) * size_of(dtype_); }
    std::string text() const { return {data(), bytes()}; }
    dsopt_tensor tensor() const { return {data(), numel_, dtype_, 0}; }

    float get(int64_t i) const { return dtype_ == DSOPT_DTYPE_F32 ? floats()[i] : widened(as<uint16_t>()[i], dtype_); }
    void set(int64_t i, float value) const {
        if (dtype_ == DSOPT_DTYPE_F32)
            floats()[i] = value;
        else
            as<uint16_t>()[i] = narrowed(value, dtype_);
    }
    /// Signs and fractions of all kinds, exponents from 2^-8 to 1, exact in the storage type.
    void fill(uint64_t seed) const {
        Random random(seed);
        for (int64_t i = 0; i < numel_; ++i) {
            const uint64_t r = random.next(), exponent = (r >> 40) % 9, sign = r >> 63;
            if (dtype_ == DSOPT_DTYPE_F32) {
                const auto bits = uint32_t(sign << 31 | (119 + exponent) << 23 | (r & 0x7fffffu));
                std::memcpy(data() + 4 * i, &bits, 4);
            } else {
                const uint64_t pattern = dtype_ == DSOPT_DTYPE_F16 ? (7 + exponent) << 10 | (r & 0x3ffu)
                                                                   : (119 + exponent) << 7 | (r & 0x7fu);
                as<uint16_t>()[i] = uint16_t(sign << 15 | pattern);
            }
        }
    }
    bool intact() const {
        const auto guarded = [](const char *at, size_t n) {
            for (size_t i = 0; i < n; ++i)
                if (at[i] != kGuard) return false;
            return true;
        };
        return guarded(memory_.get(), begin_) && guarded(memory_.get() + begin_ + bytes(), tail());
    }

private:
    struct Free {
        void operator()(char *memory) const { std::free(memory); }
    };
    static constexpr size_t kLine = 64;
    static constexpr char kGuard = 0x5a;
    size_t tail() const { return (begin_ + bytes() + 2 * kLine) / kLine * kLine - begin_ - bytes(); }
    int64_t numel_;
    int32_t dtype_;
    size_t begin_;
    std::unique_ptr<char, Free> memory_;
};

// ------------------------------------------------------------------------------------------------------------ handles
struct Release {
    void operator()(dsopt_context *context) const { dsopt_context_destroy(context); }
    void operator()(dsopt_optimizer *optimizer) const { dsopt_optimizer_destroy(optimizer); }
};
using Context = std::unique_ptr<dsopt_context, Release>;
using Optimizer = std::unique_ptr<dsopt_optimizer, Release>;

inline dsopt_context_desc context_desc(int32_t threads = 1) {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = threads;
    return desc;
}
inline Context make_context(const dsopt_context_desc &desc = context_desc()) {
    dsopt_context *context = nullptr;
    check(dsopt_context_create(&desc, &context));
    return Context(context);
}
inline dsopt_optimizer_desc optimizer_desc(double max_norm = 0, uint32_t flags = 0) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.max_norm = max_norm;
    desc.flags = flags;
    return desc;
}
inline Optimizer make_optimizer(const Context &context, const dsopt_optimizer_desc &desc = optimizer_desc()) {
    dsopt_optimizer *optimizer = nullptr;
    check(dsopt_optimizer_create(context.get(), &desc, &optimizer));
    return Optimizer(optimizer);
}
inline dsopt_group make_group(int32_t algorithm, double weight_decay = 0.01, uint32_t flags = 0) {
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, algorithm));
    group.weight_decay = weight_decay;
    group.flags = flags;
    return group;
}

// ------------------------------------------------------------------------------------------------ what tests run
// through
inline constexpr int32_t kAlgorithms[] = {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
                                          DSOPT_ALGORITHM_ADAM_LEGACY};
inline constexpr int32_t kElementWise[] = {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAM_LEGACY};
inline constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
inline std::string name_of(int32_t algorithm) {
    switch (algorithm) {
    case DSOPT_ALGORITHM_ADAM: return "Adam";
    case DSOPT_ALGORITHM_ADAMW: return "AdamW";
    case DSOPT_ALGORITHM_LAMB: return "Lamb";
    }
    return "AdamLegacy";
}
inline std::string dtype_name(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 ? "F32" : dtype == DSOPT_DTYPE_F16 ? "F16" : "BF16";
}
inline std::string algorithm_name(const testing::TestParamInfo<int32_t> &info) { return name_of(info.param); }

// -------------------------------------------------------------------------------------------------------- parallel_for
using Body = void (*)(void *arg, int64_t i);

/// A hook with threads of its own; the caller works too. `enter` runs first in each thread.
struct Workers {
    int count = 3;
    void (*enter)() = nullptr;
    static void run(void *user, int64_t n, Body body, void *arg) {
        const auto *self = static_cast<const Workers *>(user);
        std::atomic<int64_t> next{0};
        const auto work = [&] {
            for (int64_t i = next++; i < n; i = next++) body(arg, i);
        };
        std::vector<std::thread> threads;
        for (int i = 0; i < self->count; ++i)
            threads.emplace_back([&] {
                if (self->enter != nullptr) self->enter();
                work();
            });
        work();
        for (std::thread &thread : threads) thread.join();
    }
};
inline void run_reversed(void *, int64_t n, Body body, void *arg) {
    for (int64_t i = n - 1; i >= 0; --i) body(arg, i);
}
inline void run_in_order(void *, int64_t n, Body body, void *arg) {
    for (int64_t i = 0; i < n; ++i) body(arg, i);
}

// -------------------------------------------------------------------------------------------------------------- state
inline int64_t state_count(const dsopt_optimizer *opt) {
    int64_t count = 0;
    check(dsopt_optimizer_state_count(opt, &count));
    return count;
}
inline dsopt_state_info state_info(const dsopt_optimizer *opt, int64_t index) {
    DSOPT_NEW(dsopt_state_info, info);
    check(dsopt_optimizer_state(opt, index, &info));
    return info;
}
inline int64_t state_index(const dsopt_optimizer *opt, int64_t param, const std::string &name) {
    for (int64_t i = 0; i < state_count(opt); ++i)
        if (state_info(opt, i).param == param && name == state_info(opt, i).name) return i;
    throw std::runtime_error("no state " + name);
}
template <class T = float> std::vector<T> exported(dsopt_optimizer *opt, int64_t param, const std::string &name) {
    const int64_t index = state_index(opt, param, name);
    std::vector<T> values(size_t(state_info(opt, index).tensor.numel));
    check(dsopt_optimizer_export(opt, index, values.data(), values.size() * sizeof(T)));
    return values;
}
inline std::vector<int32_t> steps(dsopt_optimizer *opt) { return exported<int32_t>(opt, -1, "step"); }

/// Every state tensor, one behind the other. Allocates them if that has not happened yet.
inline std::string state_text(dsopt_optimizer *opt) {
    std::string all;
    for (int64_t i = 0; i < state_count(opt); ++i) {
        const dsopt_tensor tensor = state_info(opt, i).tensor;
        std::string bytes(size_t(tensor.numel) * size_of(tensor.dtype), '\0');
        check(dsopt_optimizer_export(opt, i, bytes.data(), bytes.size()));
        all += bytes;
    }
    return all;
}
inline double get(const dsopt_optimizer *opt, int32_t group, int32_t key) {
    double value = 0;
    check(dsopt_optimizer_get(opt, group, key, &value));
    return value;
}
/// Hyper-parameters of every group, clipping and number of calls, as bytes.
inline std::string hyper_text(const dsopt_optimizer *opt) {
    std::string all;
    const auto add = [&](double value) { all.append(reinterpret_cast<const char *>(&value), sizeof value); };
    int64_t groups = 0;
    check(dsopt_optimizer_count(opt, &groups, nullptr));
    for (int32_t group = 0; group < groups; ++group)
        for (int32_t key = DSOPT_KEY_LR; key <= DSOPT_KEY_ALGORITHM; ++key) {
            const bool trust = key == DSOPT_KEY_MIN_TRUST || key == DSOPT_KEY_MAX_TRUST;
            if (!trust || int32_t(get(opt, group, DSOPT_KEY_ALGORITHM)) == DSOPT_ALGORITHM_LAMB)
                add(get(opt, group, key));
            if (key == DSOPT_KEY_ALGORITHM) add(get(opt, group, DSOPT_KEY_EPS_UNCORRECTED));
        }
    for (const int32_t key : {DSOPT_KEY_MAX_NORM, DSOPT_KEY_MAX_VALUE, DSOPT_KEY_SKIP_BUDGET, DSOPT_KEY_CALLS})
        add(get(opt, DSOPT_ALL_GROUPS, key));
    return all;
}
inline dsopt_report report_of(dsopt_optimizer *opt) {
    DSOPT_NEW(dsopt_report, report);
    check(dsopt_optimizer_report(opt, &report));
    return report;
}

// ------------------------------------------------------------------------------------------------------------- models
struct Shape {
    int64_t numel;
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    size_t offset = 0;    // bytes behind a 64-byte line
    int64_t content = -1; // which numbers it holds; -1: those of its place in the list
};
inline std::vector<Shape> shapes_of(const std::vector<int64_t> &sizes, int32_t param = DSOPT_DTYPE_F32,
                                    int32_t grad = DSOPT_DTYPE_F32) {
    std::vector<Shape> shapes;
    for (const int64_t numel : sizes) shapes.push_back({numel, param, grad});
    return shapes;
}

inline dsopt_param param_of(const dsopt_tensor &tensor, const char *name = nullptr) {
    dsopt_param param{};
    param.tensor = tensor;
    param.name = name;
    return param;
}

/// Parameters and gradients of some tensors.
class Model {
public:
    explicit Model(const std::vector<Shape> &shapes) : shapes_(shapes) {
        for (size_t i = 0; i < shapes.size(); ++i) {
            if (shapes_[i].content < 0) shapes_[i].content = int64_t(i);
            params.emplace_back(shapes[i].numel, shapes[i].param, shapes[i].offset);
            grads.emplace_back(shapes[i].numel, shapes[i].grad, shapes[i].offset);
            params[i].fill(1000 + uint64_t(shapes_[i].content));
        }
        make_gradients(1);
    }
    void make_gradients(uint64_t seed) const {
        for (size_t i = 0; i < grads.size(); ++i) grads[i].fill(seed * 1000003 + uint64_t(shapes_[i].content));
    }
    std::vector<dsopt_param> registered(size_t begin = 0, size_t end = SIZE_MAX) const {
        std::vector<dsopt_param> list;
        for (size_t i = begin; i < std::min(end, params.size()); ++i) list.push_back(param_of(params[i].tensor()));
        return list;
    }
    static std::vector<dsopt_tensor> list_of(const std::vector<Buffer> &buffers) {
        std::vector<dsopt_tensor> list;
        for (const Buffer &buffer : buffers) list.push_back(buffer.tensor());
        return list;
    }
    std::string text() const {
        std::string all;
        for (const Buffer &param : params) all += param.text();
        return all;
    }
    bool intact() const {
        for (size_t i = 0; i < params.size(); ++i)
            if (!params[i].intact() || !grads[i].intact()) return false;
        return true;
    }
    std::vector<Buffer> params, grads;

private:
    std::vector<Shape> shapes_;
};

/// A model and its optimizer: one group unless `add` is called with more.
class Trainer {
public:
    Trainer(const std::vector<Shape> &shapes, const dsopt_optimizer_desc &desc,
            const dsopt_context_desc &context_desc = test::context_desc()) :
        model(shapes),
        grads(Model::list_of(model.grads)),
        context(make_context(context_desc)),
        opt(make_optimizer(context, desc)) {}
    Trainer(const std::vector<Shape> &shapes, const dsopt_group &group,
            const dsopt_optimizer_desc &desc = optimizer_desc(),
            const dsopt_context_desc &context_desc = test::context_desc()) :
        Trainer(shapes, desc, context_desc) {
        add(group, shapes.size());
    }
    /// The next `count` tensors of the model become a group.
    void add(const dsopt_group &group, size_t count) {
        const auto list = model.registered(added_, added_ + count);
        check(dsopt_optimizer_add_group(opt.get(), &group, list.data(), int64_t(list.size())));
        added_ += count;
    }
    dsopt_step arguments() const {
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(added_);
        return step;
    }
    dsopt_status try_step(const dsopt_step &step) const { return dsopt_optimizer_step(opt.get(), &step); }
    void step(const dsopt_step &step) const { check(try_step(step)); }
    /// One step with the gradients of `seed`.
    void step(uint64_t seed) const {
        model.make_gradients(seed);
        step(arguments());
    }
    void train(uint64_t first, uint64_t last) const {
        for (uint64_t seed = first; seed <= last; ++seed) step(seed);
    }
    /// Parameters and state.
    std::string text() const { return model.text() + state_text(opt.get()); }

    Model model;
    std::vector<dsopt_tensor> grads; // may be changed between steps
    Context context;
    Optimizer opt;

private:
    size_t added_ = 0;
};

} // namespace test
