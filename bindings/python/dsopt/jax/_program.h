// SPDX-License-Identifier: Apache-2.0
// State of one custom call of a compiled program: its attributes, and the optimizers that are made from them.
#pragma once

#include "_memory.h"
#include "_operands.h"
#include "dsopt_dl.h"
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

dsopt_dl dl;

enum Backend { kCpu = DSOPT_BACKEND_CPU, kCuda = DSOPT_BACKEND_CUDA };

// Operands of dsopt_step before the parameters, and variants of the call. The same numbers are in _call.py.
enum Option : int64_t {
    kRank = 1,          // i32: rank of this device in the comm
    kLr = 2,            // f32 per group
    kHyper = 4,         // f32 rows, dsopt_step.hyper
    kGradScale = 8,     // f32
    kSkip = 16,         // i32
    kOut = 32,          // results are new arrays instead of the parameters' memory
    kHyperIsError = 64, // on the CPU: a refused hyper-parameter fails the call
    kAfter = 128,       // an operand that is not read: this call runs after the call that wrote it
    kZeros = 256,       // on the CPU: parameters are zeros and counts of steps are ones, and neither is an operand
    kGradNorms = 512,   // f32 per group, dsopt_step.grad_norms
    kNorms = 1024,      // no step: the norms of the gradients, which are the only operands
    kOptions = 2047
};

// Throws the library's text as an error of XLA. Called in the thread whose call failed.
void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    const bool caller = status / 10 == 1;
    throw Failure{caller ? ffi::ErrorCode::kInvalidArgument : ffi::ErrorCode::kInternal,
                  std::string("dsopt: ") + dl.dsopt_last_error() + " (" + dl.dsopt_status_name(status) + ")"};
}

// No exception may reach XLA.
template <class F> ffi::Error fence(F &&body) noexcept {
    try {
        body();
        return ffi::Error::Success();
    } catch (const Failure &failure) {
        return ffi::Error(failure.code, failure.text);
    } catch (const std::exception &e) {
        return ffi::Error(ffi::ErrorCode::kInternal, std::string("dsopt: ") + e.what());
    }
}

template <class T> T attribute(const ffi::Dictionary &attrs, std::string_view name) {
    auto value = attrs.get<T>(name);
    if (!value) refuse("attribute " + std::string(name) + ": " + value.error().message());
    return *value;
}

template <class T> std::vector<T> list(const ffi::Dictionary &attrs, std::string_view name) {
    auto span = attribute<ffi::Span<const T>>(attrs, name);
    return std::vector<T>(span.begin(), span.end());
}

int32_t int32_of(int64_t value, const char *what) {
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
        refuse(std::string(what) + " is " + std::to_string(value) + ", must fit into 32 bits");
    return static_cast<int32_t>(value);
}

// ------------------------------------------------------------------------------------------------------------- handles
template <class T, void (*dsopt_dl::*Destroy)(T *)> struct Destroyer {
    void operator()(T *handle) const { (dl.*Destroy)(handle); }
};
using Context = std::unique_ptr<dsopt_context, Destroyer<dsopt_context, &dsopt_dl::dsopt_context_destroy>>;
using Optimizer = std::unique_ptr<dsopt_optimizer, Destroyer<dsopt_optimizer, &dsopt_dl::dsopt_optimizer_destroy>>;
using Scaler = std::unique_ptr<dsopt_scaler, Destroyer<dsopt_scaler, &dsopt_dl::dsopt_scaler_destroy>>;
using Comm = std::unique_ptr<dsopt_comm, Destroyer<dsopt_comm, &dsopt_dl::dsopt_comm_destroy>>;

// Comms that Python registered, by name and rank. They are borrowed: Python keeps them alive while a program may run.
struct Registry {
    std::mutex mutex;
    std::map<std::pair<std::string, int64_t>, dsopt_comm *> comms;
} *const registry = new Registry; // never destroyed: programs may outlive static objects

// ------------------------------------------------------------------------------------------------------------- program
// One custom call of a compiled program: the attributes, and the optimizers that were made from them.
struct Program {
    static ffi::TypeId id;

    Program(Backend backend_, const ffi::Dictionary &attrs) :
        backend(backend_),
        numbers(list<int64_t>(attrs, "numbers")),
        reals(list<double>(attrs, "reals")),
        group_numbers(list<int64_t>(attrs, "group_numbers")),
        group_reals(list<double>(attrs, "group_reals")),
        params(list<int64_t>(attrs, "params")),
        dims(list<int64_t>(attrs, "dims")),
        offsets(list<int64_t>(attrs, "offsets")),
        comm_name(attribute<std::string_view>(attrs, "comm")) {
        if (numbers.size() != kNumbers || reals.size() != kReals || group_numbers.size() % kGroupNumbers ||
            group_reals.size() % kGroupReals ||
            group_reals.size() / kGroupReals != group_numbers.size() / kGroupNumbers || params.size() % kParam ||
            ranks() < 1 || replicas() < 1 || !has_dims() ||
            (offsets.empty() ? 0 : count() == 0 || ranks() > 1 || offsets.size() % count()))
            refuse("the attributes are from another version of dsopt.jax");
        cut_names(attribute<std::string_view>(attrs, "names"));
        if (ranks() > 1 && comm_name.empty()) {
            unique.resize(static_cast<size_t>(replicas()), std::vector<char>(16));
            for (auto &id : unique) {
                size_t bytes = id.size();
                check(dl.dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id.data(), &bytes));
            }
        }
        if (ranks() == 1 && backend == kCpu) at(0, 0); // wrong attributes fail the compilation
        if (attribute<int64_t>(attrs, "options") & kZeros) {
            if (backend != kCpu || ranks() > 1)
                refuse("zeros in place of parameters are supported on the CPU and for one rank only");
            make_zeros();
            find_steps();
        }
    }

    // One state tensor, as in the library's list.
    struct Entry {
        std::string role; // in error texts
        int64_t param;    // -1 = of the whole optimizer
        int64_t numel;
        int32_t dtype;
        bool is_step;
        bool has_shape_of_param; // else one dimension
    };

    // Returns the optimizer of a device and rank: rank in the comm + ranks * number of the comm. Ranks of a LOCAL comm synchronize here at their first call.
    dsopt_optimizer *at(int32_t device, int64_t rank) { return made_at(device, rank).optimizer.get(); }
    const std::vector<Entry> &entries(int32_t device, int64_t rank) { return made_at(device, rank).entries; }
    dsopt_context *context(int32_t device) { return made_at(device, 0).context.get(); }

    int64_t ranks() const { return numbers[kRanks]; }
    int64_t replicas() const { return numbers[kReplicas]; }
    size_t count() const { return params.size() / kParam; }
    size_t groups() const { return group_numbers.size() / kGroupNumbers; }
    const std::string &name(size_t param) const { return names[param]; }
    int64_t numel(size_t param) const { return params[param * kParam + kNumel]; }
    ffi::DataType type(size_t param) const { return type_of(static_cast<int32_t>(params[param * kParam + kDtype])); }

    // Returns a state tensor's name for error texts.
    Label label(const Entry &entry) const {
        return {entry.role.c_str(), entry.param < 0 ? nullptr : &names[static_cast<size_t>(entry.param)]};
    }

    // The parameters of a call with kZeros, which has no operands for them.
    const std::vector<dsopt_tensor> &zeros() const { return zero_params; }

    // Inserts the count of steps, for which a call with kZeros has no operand, at its index in the state.
    void add_steps(std::vector<dsopt_tensor> &state, std::vector<int32_t> &steps) const {
        if (step_place < 0) return;
        steps.assign(static_cast<size_t>(step_tensor.numel), 1);
        dsopt_tensor tensor = step_tensor;
        tensor.data = steps.data();
        state.insert(state.begin() + step_place, tensor);
    }

    const Backend backend;

private:
    // Order of the attribute lists, as in _call.py.
    enum {
        kFlags,
        kNonfinite,
        kSeed,
        kRanks,
        kTimeout,
        kHasScaler,
        kProfile,
        kScalerFlags,
        kWindow,
        kHysteresis,
        kMasters,
        kReplicas, // comms, each of `ranks` devices
        kOverModel,
        kNumbers
    };
    enum { kMaxNorm, kMaxValue, kInit, kFactor, kMin, kMax, kReals };
    enum {
        kAlgorithm,
        kGroupFlags,
        kFreeze,
        kVarInterval,
        kLocalInterval,
        kMaxLocalInterval,
        kExpAvgFormat,
        kExpAvgSqFormat,
        kNsSteps,
        kNsSchedule,
        kNsDtype,
        kAdjust,
        kGroupNumbers
    };
    enum {
        kLearningRate,
        kBeta1,
        kBeta2,
        kEps,
        kDecay,
        kGroupMaxNorm,
        kMinTrust,
        kMaxTrust,
        kTrustBeta,
        kTrustThreshold,
        kTrustMinChange,
        kTrustMaxChange,
        kMomentum,
        kDampening,
        kLrDecay,
        kInitialAccumulator,
        kNsA,
        kNsB,
        kNsC,
        kGroupReals
    };
    enum { kNameBytes, kNumel, kDtype, kGroup, kParamFlags, kNdim, kRows, kCols, kParam };

    struct Made {
        std::mutex mutex;
        Context context;
        Scaler scaler;
        Comm comm;
        Optimizer optimizer;
        std::vector<Entry> entries;
    };

    Made &made_at(int32_t device, int64_t rank) {
        const int64_t rows = offsets.empty() ? ranks() * replicas() : static_cast<int64_t>(offsets.size() / count());
        if (rank < 0 || rank >= rows)
            refuse("operand 'rank' is " + std::to_string(rank) + ", must be from 0 to " + std::to_string(rows - 1));
        Made *made;
        {
            std::lock_guard<std::mutex> lock(mutex);
            auto &place = all[{device, rank}];
            if (!place) place = std::make_unique<Made>();
            made = place.get();
        }
        std::lock_guard<std::mutex> lock(made->mutex);
        if (!made->optimizer) make(*made, device, rank);
        return *made;
    }

    // True if the attribute dims has the shapes of all parameters.
    bool has_dims() const {
        int64_t left = static_cast<int64_t>(dims.size());
        for (size_t i = 0; i < count(); ++i) {
            const int64_t ndim = params[i * kParam + kNdim];
            if (ndim < 0 || ndim > left) return false;
            left -= ndim;
        }
        return left == 0;
    }

    void cut_names(std::string_view text) {
        for (size_t i = 0; i < count(); ++i) {
            const int64_t bytes = params[i * kParam + kNameBytes];
            if (bytes < 0 || bytes > static_cast<int64_t>(text.size()))
                refuse("attribute params: the name of parameter " + std::to_string(i) + " has " +
                       std::to_string(bytes) + " bytes, of which the attribute names has " +
                       std::to_string(text.size()));
            names.emplace_back(text.substr(0, static_cast<size_t>(bytes)));
            text.remove_prefix(static_cast<size_t>(bytes));
        }
        if (!text.empty())
            refuse("attribute names has " + std::to_string(text.size()) + " bytes more than attribute params counts");
    }

    void make(Made &made, int32_t device, int64_t rank) {
        dsopt_context *context;
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = backend;
        context_desc.device = device;
        check(dl.dsopt_context_create(&context_desc, &context));
        made.context.reset(context);

        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = int32_of(numbers[kFlags], "attribute numbers: flags");
        desc.nonfinite = int32_of(numbers[kNonfinite], "attribute numbers: nonfinite");
        desc.masters = int32_of(numbers[kMasters], "attribute numbers: masters");
        desc.seed = static_cast<uint64_t>(numbers[kSeed]);
        desc.max_norm = reals[kMaxNorm];
        desc.max_value = reals[kMaxValue];
        if (numbers[kHasScaler]) desc.scaler = scaler(made);
        if (ranks() > 1) (numbers[kOverModel] ? desc.model : desc.data) = comm(made, rank);
        dsopt_optimizer *optimizer;
        check(dl.dsopt_optimizer_create(context, &desc, &optimizer));
        Optimizer owner(optimizer);
        for (size_t g = 0; g < groups(); ++g) add_group(optimizer, g);
        add_params(optimizer, rank);
        made.entries = entries_of(optimizer);
        made.optimizer = std::move(owner);
    }

    dsopt_scaler *scaler(Made &made) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.profile = int32_of(numbers[kProfile], "attribute numbers: profile");
        desc.flags = int32_of(numbers[kScalerFlags], "attribute numbers: scaler flags");
        desc.window = int32_of(numbers[kWindow], "attribute numbers: window");
        desc.hysteresis = int32_of(numbers[kHysteresis], "attribute numbers: hysteresis");
        desc.init = reals[kInit];
        desc.factor = reals[kFactor];
        desc.min = reals[kMin];
        desc.max = reals[kMax];
        dsopt_scaler *scaler;
        check(dl.dsopt_scaler_create(made.context.get(), &desc, &scaler));
        made.scaler.reset(scaler);
        return scaler;
    }

    dsopt_comm *comm(Made &made, int64_t rank) {
        if (!comm_name.empty()) {
            std::lock_guard<std::mutex> lock(registry->mutex);
            auto found = registry->comms.find({comm_name, rank});
            if (found == registry->comms.end())
                refuse("no comm '" + comm_name + "' of rank " + std::to_string(rank) + " is registered");
            return found->second;
        }
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_LOCAL;
        desc.rank = static_cast<int32_t>(rank % ranks());
        desc.ranks = int32_of(ranks(), "attribute numbers: ranks");
        desc.timeout_ms = int32_of(numbers[kTimeout], "attribute numbers: timeout");
        desc.id = unique[static_cast<size_t>(rank / ranks())].data();
        desc.id_bytes = unique[0].size();
        dsopt_comm *comm;
        check(dl.dsopt_comm_create(made.context.get(), &desc, &comm));
        made.comm.reset(comm);
        return comm;
    }

    void add_group(dsopt_optimizer *optimizer, size_t g) {
        const int64_t *n = &group_numbers[g * kGroupNumbers];
        const double *r = &group_reals[g * kGroupReals];
        dsopt_group group;
        check(dl.dsopt_group_init(&group, sizeof group, int32_of(n[kAlgorithm], "attribute group_numbers: algorithm")));
        group.flags = int32_of(n[kGroupFlags], "attribute group_numbers: flags");
        group.freeze_step = n[kFreeze];
        group.var_interval_steps = n[kVarInterval];
        group.local_interval_steps = n[kLocalInterval];
        group.max_local_interval = n[kMaxLocalInterval];
        group.exp_avg_format = int32_of(n[kExpAvgFormat], "attribute group_numbers: exp_avg_format");
        group.exp_avg_sq_format = int32_of(n[kExpAvgSqFormat], "attribute group_numbers: exp_avg_sq_format");
        group.ns_steps = int32_of(n[kNsSteps], "attribute group_numbers: ns_steps");
        group.ns_schedule = int32_of(n[kNsSchedule], "attribute group_numbers: ns_schedule");
        group.ns_dtype = int32_of(n[kNsDtype], "attribute group_numbers: ns_dtype");
        group.adjust = int32_of(n[kAdjust], "attribute group_numbers: adjust");
        group.lr = r[kLearningRate];
        group.beta1 = r[kBeta1];
        group.beta2 = r[kBeta2];
        group.eps = r[kEps];
        group.weight_decay = r[kDecay];
        group.max_norm = r[kGroupMaxNorm];
        group.min_trust = r[kMinTrust];
        group.max_trust = r[kMaxTrust];
        group.trust_beta = r[kTrustBeta];
        group.trust_threshold = r[kTrustThreshold];
        group.trust_min_change = r[kTrustMinChange];
        group.trust_max_change = r[kTrustMaxChange];
        group.momentum = r[kMomentum];
        group.dampening = r[kDampening];
        group.lr_decay = r[kLrDecay];
        group.initial_accumulator_value = r[kInitialAccumulator];
        group.ns_a = r[kNsA];
        group.ns_b = r[kNsB];
        group.ns_c = r[kNsC];
        check(dl.dsopt_optimizer_add_group(optimizer, &group, nullptr, 0));
    }

    void add_params(dsopt_optimizer *optimizer, int64_t rank) {
        std::vector<dsopt_param> list(count());
        const int64_t *shape = dims.data();
        for (size_t i = 0; i < count(); ++i) {
            const int64_t *p = &params[i * kParam];
            list[i].tensor.numel = p[kNumel];
            list[i].tensor.dtype = int32_of(p[kDtype], "attribute params: dtype");
            list[i].group = int32_of(p[kGroup], "attribute params: group");
            list[i].flags = int32_of(p[kParamFlags], "attribute params: flags");
            list[i].name = names[i].c_str();
            list[i].ndim = int32_of(p[kNdim], "attribute params: ndim");
            list[i].dims = list[i].ndim ? shape : nullptr;
            shape += list[i].ndim;
            list[i].rows = p[kRows];
            list[i].cols = p[kCols];
            if (!offsets.empty()) list[i].offset = offsets[static_cast<size_t>(rank) * count() + i];
        }
        check(dl.dsopt_optimizer_add_params(optimizer, list.data(), static_cast<int64_t>(list.size())));
    }

    std::vector<Entry> entries_of(const dsopt_optimizer *optimizer) const {
        int64_t n;
        check(dl.dsopt_optimizer_state_count(optimizer, &n));
        std::vector<Entry> list;
        for (int64_t i = 0; i < n; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dl.dsopt_optimizer_state(optimizer, i, &info));
            const std::string name = info.name;
            list.push_back({info.param < 0 ? "state '" + name + "'" : name + " of", info.param, info.tensor.numel,
                            info.tensor.dtype, name == "step", info.block == 1});
        }
        return list;
    }

    void make_zeros() {
        size_t bytes = 0;
        for (size_t i = 0; i < count(); ++i) {
            const auto dtype = static_cast<int32_t>(params[i * kParam + kDtype]);
            bytes = std::max(bytes, static_cast<size_t>(numel(i)) * (dtype == DSOPT_DTYPE_F32 ? 4 : 2));
            zero_params.push_back({nullptr, numel(i), dtype, 0});
        }
        if (!bytes) return;
        zero_memory = Zeros(bytes);
        for (auto &tensor : zero_params)
            if (tensor.numel) tensor.data = zero_memory.data();
    }

    void find_steps() {
        const auto &list = entries(0, 0);
        const auto found = std::find_if(list.begin(), list.end(), [](const Entry &entry) { return entry.is_step; });
        if (found == list.end()) return;
        step_place = found - list.begin();
        step_tensor = {nullptr, found->numel, found->dtype, 0};
    }

    const std::vector<int64_t> numbers;
    const std::vector<double> reals;
    const std::vector<int64_t> group_numbers;
    const std::vector<double> group_reals;
    const std::vector<int64_t> params;
    const std::vector<int64_t> dims;    // of all parameters
    const std::vector<int64_t> offsets; // offsets of a rank's shards in their parameters, a row per rank; empty = whole
    std::vector<std::string> names;     // of the parameters
    const std::string comm_name;
    std::vector<std::vector<char>> unique; // ids of the LOCAL comms
    Zeros zero_memory;                     // for the largest parameter; they overlap, as they are only read
    std::vector<dsopt_tensor> zero_params;
    int64_t step_place = -1; // index in the state
    dsopt_tensor step_tensor{};
    std::mutex mutex;
    std::map<std::pair<int32_t, int64_t>, std::unique_ptr<Made>> all; // by device and rank
};

ffi::TypeId Program::id = {};
ffi::TypeInfo program_info = ffi::MakeTypeInfo<Program>();

} // namespace
