// SPDX-License-Identifier: Apache-2.0
// What the tests of mixed precision and comms share: handles that clean up, typed arrays, 16-bit rounding written down
// a second time, an optimizer with its parameters, ranks as threads.
#pragma once
#include "dsopt.h"
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace dsopt_test {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// For calls that only prepare a test.
inline void must(dsopt_status status) {
    if (status != DSOPT_OK)
        throw std::runtime_error(std::string(dsopt_status_name(status)) + ": " + dsopt_last_error());
}
inline testing::AssertionResult ok(dsopt_status status) {
    if (status == DSOPT_OK) return testing::AssertionSuccess();
    return testing::AssertionFailure() << dsopt_status_name(status) << ": " << dsopt_last_error();
}
/// The call failed with `wanted` and its text has `part` in it.
inline testing::AssertionResult fails(dsopt_status status, dsopt_status wanted, const char *part = "") {
    if (status == wanted && std::strstr(dsopt_last_error(), part) != nullptr) return testing::AssertionSuccess();
    return testing::AssertionFailure() << dsopt_status_name(status) << " instead of " << dsopt_status_name(wanted)
                                       << ", text: " << (status == DSOPT_OK ? "" : dsopt_last_error());
}

// ------------------------------------------------------------------------------------------------------------- handles
template <auto destroy> struct Release {
    template <class T> void operator()(T *handle) const { destroy(handle); }
};
using Context = std::unique_ptr<dsopt_context, Release<dsopt_context_destroy>>;
using Scaler = std::unique_ptr<dsopt_scaler, Release<dsopt_scaler_destroy>>;
using Comm = std::unique_ptr<dsopt_comm, Release<dsopt_comm_destroy>>;

inline Context make_context(int threads = 2, const char *isa = nullptr) {
    if (isa != nullptr) setenv("DSOPT_ISA", isa, 1);
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = threads;
    dsopt_context *ctx = nullptr;
    const dsopt_status status = dsopt_context_create(&desc, &ctx);
    if (isa != nullptr) unsetenv("DSOPT_ISA");
    must(status);
    return Context(ctx);
}
inline Scaler make_scaler(const Context &ctx, const dsopt_scaler_desc &desc) {
    dsopt_scaler *scaler = nullptr;
    must(dsopt_scaler_create(ctx.get(), &desc, &scaler));
    return Scaler(scaler);
}
/// A dynamic one with the numbers that most tests want.
inline Scaler make_scaler(const Context &ctx, double init, int window = 1000, int32_t flags = 0) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.init = init;
    desc.window = flags & DSOPT_SCALER_STATIC ? 0 : window;
    desc.flags = flags;
    return make_scaler(ctx, desc);
}
inline dsopt_scaler_info info_of(const Scaler &scaler) {
    DSOPT_NEW(dsopt_scaler_info, info);
    must(dsopt_scaler_query(scaler.get(), &info));
    return info;
}
inline dsopt_comm_info info_of(const Comm &comm) {
    DSOPT_NEW(dsopt_comm_info, info);
    must(dsopt_comm_query(comm.get(), &info));
    return info;
}

// ----------------------------------------------------------------------------------------------------- storage types
/// From the definition of a binary format, by exact arithmetic in double.
inline uint16_t encode(float x, int exponent_bits, int fraction_bits) {
    const uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
    const uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    if (std::isnan(x)) return uint16_t(sign | infinity | (1u << (fraction_bits - 1)));
    const double magnitude = std::fabs(double(x));
    const int least = 2 - (1 << (exponent_bits - 1));
    if (std::isinf(x)) return uint16_t(sign | infinity);
    const int exponent = magnitude == 0 ? least : std::max(std::ilogb(magnitude), least);
    const auto units = uint32_t(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
    return uint16_t(sign | std::min(infinity, (uint32_t(exponent - least) << fraction_bits) + units));
}
inline float decode(uint16_t bits, int exponent_bits, int fraction_bits) {
    const int field = (bits >> fraction_bits) & ((1 << exponent_bits) - 1),
              fraction = bits & ((1 << fraction_bits) - 1);
    const int least = 2 - (1 << (exponent_bits - 1));
    double value =
        std::ldexp(fraction + (field != 0 ? 1 << fraction_bits : 0), least - fraction_bits + std::max(field - 1, 0));
    if (field == (1 << exponent_bits) - 1) value = fraction != 0 ? double(kNaN) : double(kInf);
    return float(bits & 0x8000u ? -value : value);
}
inline size_t size_of(int32_t dtype) { return dtype == DSOPT_DTYPE_F32 || dtype == DSOPT_DTYPE_I32 ? 4 : 2; }
/// What storing `x` as `dtype` leaves of it.
inline float rounded(float x, int32_t dtype) {
    if (dtype == DSOPT_DTYPE_F16) return decode(encode(x, 5, 10), 5, 10);
    if (dtype == DSOPT_DTYPE_BF16) return decode(encode(x, 8, 7), 8, 7);
    return x;
}
inline const char *dtype_name(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 ? "F32" : dtype == DSOPT_DTYPE_F16 ? "F16" : "BF16";
}

/// A tensor with its memory.
class Array {
public:
    Array() = default;
    Array(int32_t dtype, const std::vector<float> &values) : dtype_(dtype), numel_(int64_t(values.size())) {
        raw_.resize(std::max<size_t>(values.size(), 1) * size_of(dtype)); // an empty one has an address too
        for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
    }
    Array(int32_t dtype, size_t numel, float value) : Array(dtype, std::vector<float>(numel, value)) {}
    /// A place in a gradient list for "no gradient this time".
    static Array absent(size_t numel, int32_t dtype = DSOPT_DTYPE_F32) {
        Array array(dtype, numel, 0);
        array.absent_ = true;
        return array;
    }

    void set(size_t i, float value) {
        if (dtype_ == DSOPT_DTYPE_F32)
            std::memcpy(&raw_[i * 4], &value, 4);
        else {
            const uint16_t bits = dtype_ == DSOPT_DTYPE_F16 ? encode(value, 5, 10) : encode(value, 8, 7);
            std::memcpy(&raw_[i * 2], &bits, 2);
        }
    }
    float operator[](size_t i) const {
        if (dtype_ == DSOPT_DTYPE_F32) {
            float value;
            std::memcpy(&value, &raw_[i * 4], 4);
            return value;
        }
        uint16_t bits;
        std::memcpy(&bits, &raw_[i * 2], 2);
        return dtype_ == DSOPT_DTYPE_F16 ? decode(bits, 5, 10) : decode(bits, 8, 7);
    }
    size_t size() const { return size_t(numel_); }
    int32_t dtype() const { return dtype_; }
    std::vector<float> floats() const {
        std::vector<float> values(size());
        for (size_t i = 0; i < size(); ++i) values[i] = (*this)[i];
        return values;
    }
    std::string bytes() const { return {reinterpret_cast<const char *>(raw_.data()), size() * size_of(dtype_)}; }
    /// Not const to the engine: a step may zero gradients.
    dsopt_tensor tensor() const { return {absent_ ? nullptr : raw_.data(), numel_, dtype_, 0}; }

private:
    mutable std::vector<unsigned char> raw_;
    int32_t dtype_ = DSOPT_DTYPE_F32;
    int64_t numel_ = 0;
    bool absent_ = false;
};

inline std::vector<dsopt_tensor> list_of(const std::vector<Array> &arrays) {
    std::vector<dsopt_tensor> list;
    for (const Array &array : arrays) list.push_back(array.tensor());
    return list;
}

/// Numbers that are the same on every machine (xorshift64*).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
    uint64_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545f4914f6cdd1dull;
    }
    double uniform(double low = 0, double high = 1) { return low + (high - low) * double(next() >> 11) * 0x1p-53; }
    int below(int n) { return int(next() % uint64_t(n)); }
    std::vector<float> floats(size_t n, double low = -1, double high = 1) {
        std::vector<float> values(n);
        for (float &value : values) value = float(uniform(low, high));
        return values;
    }

private:
    uint64_t state_;
};

// ---------------------------------------------------------------------------------------------------------- optimizer
inline dsopt_group group_of(int32_t algorithm, double lr = 1e-2, double weight_decay = 0.1) {
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, algorithm));
    group.lr = lr;
    group.weight_decay = weight_decay;
    return group;
}

inline std::string algorithm_name(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ADAM    ? "Adam"
           : algorithm == DSOPT_ALGORITHM_ADAMW ? "AdamW"
           : algorithm == DSOPT_ALGORITHM_LAMB  ? "Lamb"
                                                : "AdamLegacy";
}

struct Param {
    Array weight;
    std::string name = "";
    int32_t flags = 0;
    int32_t expert = 0;
    int64_t offset = 0;
};

using Snapshot = std::map<std::string, std::string>;

/// An optimizer with the memory of its parameters.
class Trainer {
public:
    Trainer(const Context &ctx, const dsopt_optimizer_desc &desc) {
        dsopt_optimizer *opt = nullptr;
        must(dsopt_optimizer_create(ctx.get(), &desc, &opt));
        opt_.reset(opt);
    }
    Trainer(const Context &ctx, const dsopt_optimizer_desc &desc, const dsopt_group &group, std::vector<Param> params) :
        Trainer(ctx, desc) {
        must(add_group(group, std::move(params)));
    }
    /// The usual case: one group, parameters called p0, p1 ...
    Trainer(const Context &ctx, const dsopt_optimizer_desc &desc, const dsopt_group &group,
            const std::vector<Array> &weights) :
        Trainer(ctx, desc) {
        std::vector<Param> params;
        for (const Array &weight : weights) params.push_back({weight});
        must(add_group(group, std::move(params)));
    }

    dsopt_status add_group(const dsopt_group &group, std::vector<Param> params) {
        std::vector<dsopt_param> list;
        std::vector<Array> weights;
        for (Param &param : params) weights.push_back(std::move(param.weight)); // moving keeps the memory where it is
        for (size_t i = 0; i < params.size(); ++i)
            list.push_back({weights[i].tensor(), params[i].name.empty() ? nullptr : params[i].name.c_str(), nullptr, 0,
                            params[i].flags, params[i].offset, params[i].expert, 0});
        const dsopt_status status = dsopt_optimizer_add_group(opt(), &group, list.data(), int64_t(list.size()));
        for (Array &weight : weights) weights_.push_back(std::move(weight));
        return status;
    }

    dsopt_optimizer *opt() const { return opt_.get(); }
    std::vector<Array> &weights() { return weights_; }
    Array &weight(size_t i = 0) { return weights_[i]; }

    /// `change` sets what the step has beside its gradients.
    dsopt_status step(const std::vector<Array> &grads, const std::function<void(dsopt_step &)> &change = {}) {
        const std::vector<dsopt_tensor> list = list_of(grads);
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        if (change) change(step);
        return dsopt_optimizer_step(opt(), &step);
    }
    dsopt_status step_accumulated() {
        DSOPT_NEW(dsopt_step, step);
        step.count = int64_t(weights_.size());
        step.flags = DSOPT_STEP_ACCUMULATED;
        return dsopt_optimizer_step(opt(), &step);
    }
    dsopt_status accumulate(const std::vector<Array> &grads) {
        const std::vector<dsopt_tensor> list = list_of(grads);
        return dsopt_optimizer_accumulate(opt(), list.data(), int64_t(list.size()), nullptr);
    }

    dsopt_report report() const {
        DSOPT_NEW(dsopt_report, report);
        must(dsopt_optimizer_report(opt(), &report));
        return report;
    }
    double get(int32_t key) const {
        double value = 0;
        must(dsopt_optimizer_get(opt(), DSOPT_ALL_GROUPS, key, &value));
        return value;
    }

    std::vector<dsopt_state_info> state() const {
        int64_t count = 0;
        must(dsopt_optimizer_state_count(opt(), &count));
        std::vector<dsopt_state_info> list;
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(opt(), i, &info));
            list.push_back(info);
        }
        return list;
    }
    /// Values of one state tensor; integers as floats too.
    std::vector<float> state(const char *name, int64_t param = -1) const {
        const std::vector<dsopt_state_info> list = state();
        for (size_t i = 0; i < list.size(); ++i) {
            if (list[i].param != param || std::strcmp(list[i].name, name) != 0) continue;
            const auto numel = size_t(list[i].tensor.numel);
            Array values(list[i].tensor.dtype == DSOPT_DTYPE_I32 ? DSOPT_DTYPE_F32 : list[i].tensor.dtype, numel, 0);
            must(dsopt_optimizer_export(opt(), int64_t(i), values.tensor().data, numel * size_of(values.dtype())));
            std::vector<float> floats = values.floats();
            if (list[i].tensor.dtype == DSOPT_DTYPE_I32)
                for (float &value : floats) {
                    int32_t integer;
                    std::memcpy(&integer, &value, 4);
                    value = float(integer);
                }
            return floats;
        }
        throw std::runtime_error(std::string("no state ") + name);
    }
    float first(const char *name, int64_t param = 0) const { return state(name, param).at(0); }

    /// The bytes of everything that a step may change, parameters included.
    Snapshot snapshot() {
        Snapshot all;
        for (size_t i = 0; i < weights_.size(); ++i) all["param " + std::to_string(i)] = weights_[i].bytes();
        const std::vector<dsopt_state_info> list = state();
        for (size_t i = 0; i < list.size(); ++i) {
            std::string bytes(size_t(list[i].tensor.numel) * size_of(list[i].tensor.dtype), 0);
            must(dsopt_optimizer_export(opt(), int64_t(i), bytes.data(), bytes.size()));
            all[std::string(list[i].name) + " " + std::to_string(list[i].param)] = bytes;
        }
        return all;
    }

private:
    std::unique_ptr<dsopt_optimizer, Release<dsopt_optimizer_destroy>> opt_;
    std::vector<Array> weights_;
};

inline testing::AssertionResult same(const Snapshot &a, const Snapshot &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " tensors";
    for (const auto &[name, bytes] : a) {
        const auto other = b.find(name);
        if (other == b.end()) return testing::AssertionFailure() << "no " << name;
        if (other->second != bytes) return testing::AssertionFailure() << name << " differs";
    }
    return testing::AssertionSuccess();
}
/// Equal bits, or both NaN.
inline testing::AssertionResult same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " elements";
    for (size_t i = 0; i < a.size(); ++i)
        if (!(std::isnan(a[i]) && std::isnan(b[i])) && std::memcmp(&a[i], &b[i], 4) != 0)
            return testing::AssertionFailure() << "element " << i << ": " << testing::PrintToString(a[i]) << " and "
                                               << testing::PrintToString(b[i]);
    return testing::AssertionSuccess();
}

/// A checkpoint in memory.
struct File {
    std::string data;
    dsopt_io io(int32_t flags = 0) {
        DSOPT_NEW(dsopt_io, io);
        io.flags = flags;
        io.user = this;
        return io;
    }
    dsopt_status save(const Trainer &from, int32_t flags = 0) {
        data.clear();
        dsopt_io to = io(flags);
        to.write = [](void *user, const void *bytes, size_t n) {
            static_cast<File *>(user)->data.append(static_cast<const char *>(bytes), n);
            return 0;
        };
        return dsopt_optimizer_save(from.opt(), nullptr, &to);
    }
    dsopt_status load(const Trainer &into, int32_t flags = 0) {
        dsopt_io from = io(flags);
        from.total = data.size();
        from.read = read;
        return dsopt_optimizer_load(into.opt(), nullptr, &from);
    }
    /// The files of several ranks, in the order given.
    static dsopt_status load_all(const Trainer &into, const std::vector<const File *> &files, int32_t flags = 0) {
        std::vector<void *> users;
        std::vector<uint64_t> totals;
        for (const File *file : files) {
            users.push_back(const_cast<File *>(file));
            totals.push_back(file->data.size());
        }
        DSOPT_NEW(dsopt_io, io);
        io.flags = flags;
        io.read = read;
        io.files = int32_t(files.size());
        io.users = users.data();
        io.totals = totals.data();
        return dsopt_optimizer_load(into.opt(), nullptr, &io);
    }
    static int read(void *user, uint64_t offset, void *bytes, size_t n) {
        std::memcpy(bytes, static_cast<File *>(user)->data.data() + offset, n);
        return 0;
    }
};

// -------------------------------------------------------------------------------------------------------------- ranks
using CommId = std::array<char, 16>;
inline CommId new_id() {
    CommId id;
    size_t bytes = id.size();
    must(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id.data(), &bytes));
    return id;
}
inline dsopt_comm_desc local_desc(const CommId &id, int rank, int ranks, int timeout_ms = 60000) {
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_LOCAL;
    desc.rank = rank;
    desc.ranks = ranks;
    desc.timeout_ms = timeout_ms;
    desc.id = id.data();
    desc.id_bytes = id.size();
    return desc;
}
inline Comm local_comm(const Context &ctx, const CommId &id, int rank, int ranks, int timeout_ms = 60000) {
    const dsopt_comm_desc desc = local_desc(id, rank, ranks, timeout_ms);
    dsopt_comm *comm = nullptr;
    must(dsopt_comm_create(ctx.get(), &desc, &comm));
    return Comm(comm);
}
inline Comm self_comm(const Context &ctx) {
    dsopt_comm *comm = nullptr;
    must(dsopt_comm_create(ctx.get(), nullptr, &comm));
    return Comm(comm);
}
/// body(rank) on a thread each.
inline void run_ranks(int ranks, const std::function<void(int)> &body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&body, rank] {
            try {
                body(rank);
            } catch (const std::exception &e) { ADD_FAILURE() << "rank " << rank << ": " << e.what(); }
        });
    for (std::thread &thread : threads) thread.join();
}
/// One meeting of all ranks: the norm of one element.
inline dsopt_status meet(const Context &ctx, const Comm &comm, float value = 1, dsopt_norm_result *result = nullptr) {
    Array one(DSOPT_DTYPE_F32, 1, value);
    const dsopt_tensor tensor = one.tensor();
    dsopt_norm_result local;
    return dsopt_tensors_norm(ctx.get(), &tensor, 1, DSOPT_NORM_L2, 0, comm.get(), result != nullptr ? result : &local,
                              nullptr);
}

} // namespace dsopt_test
