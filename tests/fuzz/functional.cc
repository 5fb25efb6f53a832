// SPDX-License-Identifier: Apache-2.0
// Compares dsopt_optimizer_apply with dsopt_optimizer_step: one optimizer owns no memory, its twin owns all memory, and
// both take the same steps. All memory has exactly the size that a call may touch, and empty tensors have none.
// Steps that both forms accept must give the same bits, two identical calls of apply must give the same bits, a
// rejected call must not change the caller's memory, and words in the state that no step writes must lead to a status.
#include "support/numbers.h"
#include "world.h"
#include <map>
#include <optional>

namespace fuzz {
namespace {

constexpr int kMaxParams = 4, kMaxRounds = 12;
constexpr int64_t kBlock = 256; // elements per scale
constexpr float kScalars[] = {test::kNaN,  0,      1,       0.5f, 1e-3f,  0.9f,  -1,
                              -test::kInf, 1e-45f, 3.4e38f, 2,    0.999f, 1e-8f, test::kInf};
constexpr int32_t kStepFlags[] = {
    0, 0, DSOPT_STEP_ZERO_GRADS, DSOPT_STEP_NO_NAN, DSOPT_STEP_OUT_ONLY, DSOPT_STEP_DELTA};

// -------------------------------------------------------------------------------------------------------------- memory
/// One list. Each tensor is in an allocation of exactly its size; an empty tensor has none.
class Arrays {
public:
    explicit Arrays(const test::Memory &memory) : memory_(&memory) {}
    void add(int32_t dtype, const Bytes &content) {
        dtypes_.push_back(dtype);
        blocks_.emplace_back(*memory_, content);
    }
    Arrays copy() const {
        Arrays other(*memory_);
        for (size_t i = 0; i < size(); ++i) other.add(dtypes_[i], blocks_[i].text());
        return other;
    }
    void clear() {
        dtypes_.clear();
        blocks_.clear();
    }
    size_t size() const { return blocks_.size(); }
    size_t bytes(size_t i) const { return blocks_[i].bytes(); }
    Bytes text(size_t i) const { return blocks_[i].text(); }
    Bytes text() const {
        Bytes all;
        for (const Block &block : blocks_) all += block.text();
        return all;
    }
    void set(size_t i, const Bytes &content) const { blocks_[i].set(content); }
    dsopt_tensor tensor(size_t i) const {
        const size_t bytes = blocks_[i].bytes();
        return {bytes != 0 ? blocks_[i].data() : nullptr, int64_t(bytes / size_of(dtypes_[i])), dtypes_[i], 0};
    }
    std::vector<dsopt_tensor> list() const {
        std::vector<dsopt_tensor> all;
        for (size_t i = 0; i < size(); ++i) all.push_back(tensor(i));
        return all;
    }

private:
    const test::Memory *memory_;
    std::vector<int32_t> dtypes_;
    std::vector<Block> blocks_;
};

/// Arguments of a step other than its lists.
struct Request {
    int32_t flags = 0;
    bool outs = false;
    std::vector<bool> absent;
    std::optional<std::vector<float>> rates, hypers, scale, norms;
    std::optional<int32_t> skip;
};

/// All memory that a step reads and writes.
struct Owner {
    Arrays params, grads, outs, state, scalars;
    Block workspace, report;

    Owner(const test::Memory &memory, size_t workspace_bytes, size_t shift) :
        params(memory),
        grads(memory),
        outs(memory),
        state(memory),
        scalars(memory),
        workspace(memory, workspace_bytes, shift),
        report(memory, Bytes(DSOPT_REPORT_FLOATS * sizeof(float), 0)) {}
    /// Copies everything except the workspace, which holds no data between calls.
    Owner copy(const test::Memory &memory, char workspace_byte) const {
        Owner other(memory, workspace.bytes(), 0);
        other.params = params.copy();
        other.grads = grads.copy();
        other.outs = outs.copy();
        other.state = state.copy();
        other.workspace.set(Bytes(workspace.bytes(), workspace_byte));
        other.report.set(report.text());
        return other;
    }
    Bytes text() const { return params.text() + grads.text() + outs.text() + state.text(); }
};

/// Arguments of a step on an owner's memory, and their lists. Each list has one entry more than its count, so that a
/// count that is too large by one is rejected because of a valid entry.
struct Call {
    std::vector<dsopt_tensor> params, grads, outs, state;
    dsopt_step step{};

    Call(Owner &owner, const Request &request, bool functional) :
        params(longer(owner.params)),
        grads(longer(owner.grads)),
        outs(longer(owner.outs)),
        state(longer(owner.state)) {
        for (size_t i = 0; i < request.absent.size(); ++i)
            if (request.absent[i]) grads[i].data = nullptr;
        step.size = sizeof step;
        step.flags = request.flags;
        step.count = int64_t(owner.params.size());
        step.report = reinterpret_cast<float *>(owner.report.data());
        owner.scalars.clear();
        const auto floats = [&](const std::optional<std::vector<float>> &values) -> const float * {
            if (!values) return nullptr;
            owner.scalars.add(DSOPT_DTYPE_F32,
                              Bytes(reinterpret_cast<const char *>(values->data()), values->size() * 4));
            return static_cast<const float *>(owner.scalars.tensor(owner.scalars.size() - 1).data);
        };
        step.lr = floats(request.rates);
        step.hyper = floats(request.hypers);
        step.grad_scale = floats(request.scale);
        step.grad_norms = floats(request.norms);
        if (request.skip) {
            owner.scalars.add(DSOPT_DTYPE_I32, Bytes(reinterpret_cast<const char *>(&*request.skip), 4));
            step.skip = static_cast<const int32_t *>(owner.scalars.tensor(owner.scalars.size() - 1).data);
        }
        step.grads = grads.data();
        if (request.outs) step.out = outs.data();
        if (!functional) return; // step uses the parameters and the state that are bound
        step.params = params.data();
        step.state = state.data();
        step.state_count = int64_t(owner.state.size());
        step.workspace = owner.workspace.bytes() != 0 ? owner.workspace.data() : nullptr;
        step.workspace_bytes = owner.workspace.bytes();
    }
    Call(const Call &) = delete;

private:
    static std::vector<dsopt_tensor> longer(const Arrays &arrays) {
        std::vector<dsopt_tensor> list = arrays.list();
        list.push_back({});
        return list;
    }
};

// -------------------------------------------------------------------------------------------------------------- a case
struct Case {
    int32_t algorithm = 0, compat = 0, flags = 0, nonfinite = 0, masters = 0;
    int ranks = 1, rank = 0;
    bool scaler = false;
    double max_norm = 0, max_value = 0;
    size_t second_group = 0; // its first parameter
    std::vector<dsopt_group> groups;
    std::vector<int64_t> sizes;
    std::vector<int32_t> dtypes, param_flags, out_dtypes;
    std::vector<int64_t> offsets;
    std::vector<Cut> cuts;
    const dsopt_group &group_of(size_t param) const { return groups[param < second_group ? 0 : 1]; }
    bool splits() const { return (flags & DSOPT_OPTIMIZER_SPLIT_MATRICES) != 0; }
    bool is_onebit() const { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }
    size_t params() const { return sizes.size(); }
};

/// Clears the flag and the offset of a parameter if they would have no effect.
void clear_without_effect(Case &c, size_t param) {
    const dsopt_group &group = c.group_of(param);
    int32_t &flags = c.param_flags[param];
    if (Formats{group.exp_avg_format, group.exp_avg_sq_format}.are_f32()) flags &= ~DSOPT_PARAM_F32_MOMENTS;
    const bool uses_offset = !(flags & DSOPT_PARAM_F32_MOMENTS) &&
                             (group.exp_avg_format >= DSOPT_MOMENT_BF16_RANDOM || group.exp_avg_sq_format != 0);
    if (group.algorithm == DSOPT_ALGORITHM_MUON) c.offsets[param] = 0;
    if (!uses_offset && !(c.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING)) c.offsets[param] = 0;
}

/// Partitions parameters of Muon into matrices. If ranks partition those, all are alike and this is rank 0: it sends no
/// less than the others, so they send defined values.
void choose_matrices(Choices &choose, Case &c) {
    const bool splits =
        c.algorithm == DSOPT_ALGORITHM_MUON && c.ranks > 1 && !(c.flags & DSOPT_OPTIMIZER_SHARD) && choose.flip();
    if (splits) {
        c.flags |= DSOPT_OPTIMIZER_SPLIT_MATRICES;
        c.rank = 0;
        for (dsopt_group &group : c.groups)
            if (group.algorithm == DSOPT_ALGORITHM_MUON) group.ns_dtype = c.groups[0].ns_dtype;
    }
    std::optional<Cut> first;
    c.cuts.resize(c.params());
    for (size_t i = 0; i < c.params(); ++i) {
        if (c.group_of(i).algorithm != DSOPT_ALGORITHM_MUON) continue;
        c.cuts[i] = splits && first ? *first : cut_of(choose);
        first = c.cuts[i];
        c.sizes[i] = c.cuts[i].numel;
    }
}

/// Chooses only valid cases: rejected arguments are the subject of `calls`.
Case case_of(Choices &choose) {
    Case c;
    c.algorithm = algorithm_of(choose.byte(), kAlgorithms);
    const bool onebit = c.is_onebit(), has_compat = onebit || c.algorithm <= DSOPT_ALGORITHM_ADAM_LEGACY;
    if (has_compat && choose.rarely(4)) c.compat = DSOPT_COMPAT_DEEPSPEED;
    if (choose.rarely(3)) c.ranks = onebit ? 2 + choose.below(2) : 2;
    c.rank = choose.below(c.ranks);
    if (choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_NO_MASTER;
    if (!onebit && choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
    if (c.flags & DSOPT_OPTIMIZER_NO_MASTER && c.compat == DSOPT_COMPAT_NONE && choose.rarely(3))
        c.flags |= DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    if (choose.rarely(4)) c.flags |= DSOPT_OPTIMIZER_ACCUMULATE;
    if (choose.rarely(4)) c.flags |= DSOPT_OPTIMIZER_TIMING;
    if (onebit && choose.flip() && c.ranks > 1) c.flags |= DSOPT_OPTIMIZER_AVERAGES;
    if (c.ranks > 1 && choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_CHECK_RANKS;
    if (c.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM && c.compat == DSOPT_COMPAT_NONE && choose.rarely(3))
        c.flags |= DSOPT_OPTIMIZER_MOMENTUM_BITS;
    c.nonfinite = choose.below(3);
    const bool may_have_formats = !onebit && c.compat == DSOPT_COMPAT_NONE;
    if (!(c.flags & DSOPT_OPTIMIZER_NO_MASTER)) {
        const uint8_t byte = choose.byte();
        c.masters = byte % 2;
        if (may_have_formats && byte / 2 % 2 != 0) c.masters = DSOPT_MASTERS_REMAINDER;
        if (may_have_formats && c.ranks > 1 && byte / 4 % 4 == 1) {
            c.flags |= DSOPT_OPTIMIZER_SHARD;
            if (byte / 16 % 2 != 0) c.flags |= DSOPT_OPTIMIZER_AVERAGES;
        }
    }
    c.scaler = choose.rarely(3);
    if (choose.flip()) c.max_norm = 1;
    if (choose.rarely(4)) c.max_value = 0.5;
    const int params = choose.below(kMaxParams + 1);
    for (int i = 0; i < params; ++i) {
        c.sizes.push_back(choose.of(kSizes));
        int32_t dtype = choose.of(kDtypes), flags = 0;
        if (c.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) dtype = DSOPT_DTYPE_BF16;
        if (onebit && c.flags & DSOPT_OPTIMIZER_NO_MASTER) dtype = DSOPT_DTYPE_F32;
        if (c.masters == DSOPT_MASTERS_REMAINDER && dtype == DSOPT_DTYPE_F16) dtype = DSOPT_DTYPE_BF16;
        const uint8_t byte = choose.byte();
        if (byte % 8 == 7) flags = DSOPT_PARAM_REPLICATED;
        if (byte % 8 == 5) flags = DSOPT_PARAM_F32_MOMENTS; // in groups with formats
        // The new remainder and an output in BF16 are the new master.
        const bool is_split = c.masters == DSOPT_MASTERS_REMAINDER && dtype == DSOPT_DTYPE_BF16;
        c.out_dtypes.push_back(is_split && byte / 8 % 4 != 3 ? DSOPT_DTYPE_BF16 : DSOPT_DTYPE_F32);
        c.offsets.push_back(byte / 32 == 7 ? (int64_t(1) << 31) + kBlock : 0); // where something depends on it
        if (onebit && !(c.flags & DSOPT_OPTIMIZER_MOMENTUM_BITS) && choose.rarely(6)) flags = DSOPT_PARAM_MASKED;
        c.dtypes.push_back(dtype);
        c.param_flags.push_back(flags);
    }
    c.groups.resize(1 + size_t(choose.below(2)));
    c.second_group = c.groups.size() == 2 ? size_t(choose.below(params + 1)) : c.params();
    for (dsopt_group &group : c.groups) {
        const bool is_beside = c.algorithm == DSOPT_ALGORITHM_MUON && &group != c.groups.data() && choose.flip();
        must("group_init",
             dsopt_group_init(&group, sizeof group, is_beside ? int32_t(DSOPT_ALGORITHM_ADAMW) : c.algorithm));
        if (group.algorithm == DSOPT_ALGORITHM_MUON) choose_iterations(choose, group);
        if (c.algorithm != DSOPT_ALGORITHM_SGD) group.weight_decay = 0.01;
        const uint8_t byte = choose.byte();
        if (byte % 2 != 0) group.lr = 0.05;
        if (may_have_formats && c.masters != DSOPT_MASTERS_FLAT && byte / 2 % 2 != 0) {
            const Formats formats = formats_of(group.algorithm, byte / 4 % kFormatChoices);
            group.exp_avg_format = formats.first;
            group.exp_avg_sq_format = formats.second;
            if (c.algorithm == DSOPT_ALGORITHM_SGD && !formats.are_f32()) group.momentum = 0.9;
        }
        if (onebit) group.freeze_step = 2;
        if (c.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            group.var_interval_steps = 1;
            group.local_interval_steps = 2;
            group.max_local_interval = 4;
        }
        if (c.algorithm == DSOPT_ALGORITHM_SGD && choose.flip()) group.momentum = 0.9;
        if (c.algorithm == DSOPT_ALGORITHM_ADAGRAD && choose.flip()) group.initial_accumulator_value = 0.1;
        if (!onebit && choose.rarely(4)) group.max_norm = 0.5;
    }
    choose_matrices(choose, c);
    for (size_t i = 0; i < c.params(); ++i) clear_without_effect(c, i);
    return c;
}

/// An optimizer of the case. Without weights its parameters have no memory.
struct Side {
    test::Comm comm;
    test::Scaler scaler;
    test::Optimizer optimizer;
    dsopt_status status = DSOPT_OK;

    Side(const Case &c, const test::Context &context, Echo &echo, const Arrays *weights) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = c.compat;
        desc.flags = c.flags;
        desc.nonfinite = c.nonfinite;
        desc.masters = c.masters;
        desc.max_norm = c.max_norm;
        desc.max_value = c.max_value;
        if (c.ranks > 1) comm = echo_comm(context, echo);
        desc.data = comm.get();
        if (c.scaler) scaler = test::make_scaler(context, 4, 2);
        desc.scaler = scaler.get();
        dsopt_optimizer *made = nullptr;
        status = counted("optimizer_create", dsopt_optimizer_create(context.get(), &desc, &made));
        optimizer.reset(made);
        std::vector<dsopt_param> params(c.params());
        std::vector<std::string> names(c.params());
        for (size_t i = 0; i < c.params(); ++i) {
            names[i] = "p" + std::to_string(i);
            params[i].name = names[i].c_str();
            params[i].flags = c.param_flags[i];
            params[i].offset = c.offsets[i];
            c.cuts[i].describe(params[i]);
            params[i].tensor = {nullptr, c.sizes[i], c.dtypes[i], 0};
            if (weights != nullptr) params[i].tensor.data = weights->tensor(i).data;
        }
        for (size_t g = 0; g < c.groups.size() && status == DSOPT_OK; ++g) {
            const size_t begin = g == 0 ? 0 : c.second_group, end = g == 0 ? c.second_group : c.params();
            status = counted("add_group", dsopt_optimizer_add_group(optimizer.get(), &c.groups[g],
                                                                    params.data() + begin, int64_t(end - begin)));
        }
    }
};

/// Created once per backend, because detecting the processor's features takes longer than a step.
const test::Context &context_on(int32_t backend) {
    // Leaked: the emulated device may end before static destructors run.
    static auto *const all = new std::map<int32_t, test::Context>;
    test::Context &one = (*all)[backend];
    if (one == nullptr) one = test::make_context(test::context_desc(1, backend));
    return one;
}

// -------------------------------------------------------------------------------------------------------- training run
class Functional : public World {
public:
    explicit Functional(const Choices &choices) : World(choices), case_(case_of(choose)) {
        echo_ = {case_.rank, case_.ranks};
    }
    void run() {
        const test::Context &context = context_on(backend);
        const Side functional(case_, context, echo_, nullptr);
        if (functional.status != DSOPT_OK) return;
        Arrays weights(memory);
        for (size_t i = 0; i < case_.params(); ++i)
            weights.add(case_.dtypes[i], numbers(case_.sizes[i], case_.dtypes[i]));
        const Side stateful(case_, context, echo_, &weights);
        if (stateful.status != DSOPT_OK)
            finding("a second optimizer of the same case: %s", dsopt_status_name(stateful.status));
        opt_ = functional.optimizer.get();
        twin_ = stateful.optimizer.get();
        scaler_ = functional.scaler.get();
        weights_ = &weights;
        size_t bytes = 0;
        must("workspace", dsopt_optimizer_workspace(opt_, &bytes));
        Owner owner(memory, bytes, size_t(choose.below(64)));
        prepare(owner);
        for (int round = 0; choose.are_left() && round < kMaxRounds; ++round) {
            const Request request = next_request(owner);
            switch (choose.below(8)) {
            case 4:
            case 5: corrupt_call(owner, request); break;
            case 6:
            case 7: corrupt_state(owner, request); break;
            default: take(owner, request);
            }
        }
    }

private:
    Bytes numbers(int64_t numel, int32_t dtype, bool wild = false) {
        test::Random random(choose.byte());
        Bytes bytes(size_t(numel) * size_of(dtype), 0);
        for (int64_t i = 0; i < numel; ++i) {
            float value = float(random.uniform(-2, 2));
            if (wild && random.below(61) == 0) value = test::float_of(kWords[random.below(int(std::size(kWords)))]);
            test::store(&bytes[size_t(i) * size_of(dtype)], dtype, value);
        }
        return bytes;
    }
    dsopt_status init_state(const std::vector<dsopt_tensor> &params, int64_t count,
                            const std::vector<dsopt_tensor> &state, int64_t state_count) {
        return counted("init_state",
                       dsopt_optimizer_init_state(opt_, params.data(), count, state.data(), state_count, nullptr));
    }
    dsopt_status apply(const dsopt_step &step) { return counted("apply", dsopt_optimizer_apply(opt_, &step)); }

    /// Allocates everything and initializes the state of both forms.
    void prepare(Owner &owner) {
        owner.workspace.set(Bytes(owner.workspace.bytes(), 0x5a));
        owner.params = weights_->copy();
        for (size_t i = 0; i < case_.params(); ++i) {
            const int32_t dtype = case_.out_dtypes[i];
            owner.outs.add(dtype, Bytes(size_t(case_.sizes[i]) * size_of(dtype), 0));
        }
        int64_t count = 0;
        must("state_count", dsopt_optimizer_state_count(opt_, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must("state", dsopt_optimizer_state(opt_, i, &info));
            names_.push_back(info.name);
            owner.state.add(info.tensor.dtype, Bytes(bytes_of(info.tensor), '\xab'));
        }
        const std::vector<dsopt_tensor> params = owner.params.list(), state = owner.state.list();
        if (init_state(params, int64_t(params.size()), state, count) != DSOPT_OK)
            finding("init_state refused a valid list");
        for (size_t i = 0; i < names_.size(); ++i) { // the first call creates the twin's state
            if (owner.state.bytes(i) == 0 || names_[i] == "loss_scale" || names_[i] == "scaler") continue;
            Bytes host(owner.state.bytes(i), 0);
            must("export", dsopt_optimizer_export(twin_, int64_t(i), host.data(), host.size()));
            break;
        }
        compare(owner, "init_state");
    }
    /// Compares state and parameters of both optimizers.
    void compare(const Owner &owner, const char *when) {
        for (size_t i = 0; i < names_.size(); ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must("state", dsopt_optimizer_state(twin_, int64_t(i), &info));
            if (info.tensor.data == nullptr || owner.state.bytes(i) == 0) continue;
            Bytes kept(owner.state.bytes(i), 0);
            memory.read(kept.data(), info.tensor.data, kept.size());
            differ(when, (names_[i] + " of parameter " + std::to_string(info.param)).c_str(), owner.state.text(i),
                   kept);
        }
        for (size_t i = 0; i < case_.params(); ++i)
            differ(when, ("parameter " + std::to_string(i)).c_str(), owner.params.text(i), weights_->text(i));
    }
    void differ(const char *when, const char *what, const Bytes &one, const Bytes &other) const {
        if (one == other) return;
        size_t at = 0;
        while (at < one.size() && at < other.size() && one[at] == other[at]) ++at;
        finding(
            "after %s: %s differs at byte %zu of %zu (algorithm %d, compat %d, flags %x, rank %d of %d, backend %d)",
            when, what, at, one.size(), int(case_.algorithm), int(case_.compat), unsigned(case_.flags), case_.rank,
            case_.ranks, int(backend));
    }

    /// Draws the gradients of a step into the owner's memory, and its other arguments.
    Request next_request(Owner &owner) {
        Request request;
        owner.grads = Arrays(memory);
        for (const int64_t numel : case_.sizes) {
            const int32_t dtype = choose.of(kDtypes);
            request.absent.push_back(choose.rarely(8) && !case_.splits()); // without it nothing is sent
            owner.grads.add(dtype, numbers(numel, dtype, choose.rarely(8)));
        }
        request.flags = choose.of(kStepFlags);
        request.outs = (request.flags & (DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA)) != 0 || choose.rarely(4);
        const size_t groups = case_.groups.size();
        switch (choose.below(4)) {
        case 1:
            request.hypers.emplace(groups * DSOPT_HYPER_FLOATS, test::kNaN); // as the host has them
            (*request.hypers)[choose.byte() % request.hypers->size()] = choose.of(kScalars);
            break;
        case 2:
            request.rates.emplace(groups, 0.01f);
            (*request.rates)[0] = choose.of(kScalars);
            break;
        }
        switch (choose.below(8)) {
        case 1: request.scale = {choose.of(kScalars)}; break;
        case 2: request.skip = choose.below(2); break;
        case 3:
            request.norms.emplace(groups, 1.0f);
            (*request.norms)[0] = choose.of(kScalars);
            break;
        }
        return request;
    }

    /// Takes the same step in both forms, and repeats the functional one with another workspace.
    void take(Owner &owner, const Request &request) {
        Owner twin = owner.copy(memory, 0), again = owner.copy(memory, 0x33);
        const Bytes weights = owner.params.text();
        const Call call(owner, request, true), kept(twin, request, false), repeated(again, request, true);
        const dsopt_status status = apply(call.step), other = counted("step", dsopt_optimizer_step(twin_, &kept.step)),
                           second = apply(repeated.step);
        if (status != other || status != second)
            finding("apply %s, step %s, apply again %s", dsopt_status_name(status), dsopt_status_name(other),
                    dsopt_status_name(second));
        if (request.flags & (DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA))
            differ("OUT_ONLY or DELTA", "a parameter", owner.params.text(), weights);
        differ("two identical calls of apply", "memory of the caller", owner.text(), again.text());
        differ("two identical calls of apply", "the report", owner.report.text(), again.report.text());
        differ("apply and step", "the report", owner.report.text(), twin.report.text());
        differ("apply and step", "a gradient", owner.grads.text(), twin.grads.text());
        differ("apply and step", "an output", owner.outs.text(), twin.outs.text());
        compare(owner, "apply and step");
    }

    /// Makes a call with one or two errors. A rejected call must not have changed anything.
    void corrupt_call(const Owner &owner, const Request &request) {
        Owner other = owner.copy(memory, 0);
        Call call(other, request, true);
        for (int i = 1 + choose.below(2); i > 0; --i) break_one_of(call, other);
        refuse_or_obey("apply", other, [&] { return apply(call.step); });
        if (!choose.flip()) return;
        Owner fresh = owner.copy(memory, 0);
        Call lists(fresh, request, true);
        const bool params = choose.flip();
        int64_t count = lists.step.count, state_count = lists.step.state_count;
        if (choose.rarely(4))
            --(params ? count : state_count);
        else
            make_invalid(any(params ? lists.params : lists.state));
        refuse_or_obey("init_state", fresh, [&] { return init_state(lists.params, count, lists.state, state_count); });
    }
    void refuse_or_obey(const char *name, const Owner &owner, const std::function<dsopt_status()> &call) {
        const Bytes before = owner.text();
        const dsopt_status status = call();
        if (status != DSOPT_OK) differ(name, dsopt_status_name(status), owner.text(), before);
    }
    dsopt_tensor &any(std::vector<dsopt_tensor> &list) { return list[index_of(list)]; }
    void break_one_of(Call &call, const Owner &owner) {
        dsopt_step &step = call.step;
        switch (choose.below(12)) {
        case 0: step.count += choose.flip() ? 1 : -1; break;
        case 1: step.state_count += choose.flip() ? 1 : -1; break;
        case 2: step.workspace_bytes -= std::min<size_t>(step.workspace_bytes, 256); break;
        case 3: step.workspace = nullptr; break;
        case 4: step.reserved = 1; break;
        case 5: step.flags = choose.below(64); break;
        case 6: step.lr = step.hyper = reinterpret_cast<const float *>(owner.report.data()); break;
        case 7: step.grad_scale = reinterpret_cast<const float *>(owner.report.data() + 2); break;
        case 8: step.state = nullptr; break;
        case 9: step.params = nullptr; break;
        default:
            make_invalid(any(choose.flip()   ? call.state
                             : choose.flip() ? call.params
                             : choose.flip() ? call.grads
                                             : call.outs));
        }
    }

    /// Writes words into the state that no step writes. Then calls apply three times on two identical copies of all
    /// memory, and decodes the words.
    void corrupt_state(const Owner &owner, const Request &request) {
        if (names_.empty()) return;
        Owner other = owner.copy(memory, 0);
        for (int i = 1 + choose.below(4); i > 0; --i) {
            size_t entry = choose.byte() % names_.size();
            if (choose.flip()) // prefers counters: they are few, and most branches depend on them
                for (size_t k = names_.size(); k-- > 0;)
                    if (other.state.tensor(k).dtype == DSOPT_DTYPE_I32 && choose.flip()) {
                        entry = k;
                        break;
                    }
            fill_words(other.state.tensor(entry));
        }
        Owner again = other.copy(memory, 0x33);
        const Call call(other, request, true), repeated(again, request, true);
        for (int i = 0; i < 3; ++i) {
            const dsopt_status status = apply(call.step), second = apply(repeated.step);
            if (status != second)
                finding("invalid words: apply %s, again %s", dsopt_status_name(status), dsopt_status_name(second));
            differ("two identical calls on invalid words", "memory of the caller", other.text(), again.text());
            differ("two identical calls on invalid words", "the report", other.report.text(), again.report.text());
            if (status != DSOPT_OK) break;
        }
        for (size_t i = 0; i < names_.size(); ++i) decode(other, i);
    }
    void decode(const Owner &owner, size_t entry) {
        if (names_[entry] != "schedule" && names_[entry] != "scaler") return;
        Bytes bytes = owner.state.text(entry);
        std::vector<int32_t> host(bytes.size() / sizeof(int32_t));
        std::memcpy(host.data(), bytes.data(), bytes.size());
        const dsopt_tensor tensor = owner.state.tensor(entry);
        if (names_[entry] == "schedule") {
            DSOPT_NEW(dsopt_schedule_info, info);
            const Block result(memory, Bytes(sizeof(int32_t), 0));
            const dsopt_status decoded = counted("schedule_decode", dsopt_schedule_decode(opt_, host.data(), &info)),
                               asked = counted("reduction",
                                               dsopt_optimizer_next_reduction_on_device(
                                                   opt_, &tensor, reinterpret_cast<int32_t *>(result.data()), nullptr));
            int32_t reduction = 0;
            memory.read(&reduction, result.data(), sizeof reduction);
            if (decoded == DSOPT_OK && asked == DSOPT_OK && info.reduction != reduction)
                finding("schedule_decode says reduction %d, reduction says %d", int(info.reduction), int(reduction));
        } else {
            DSOPT_NEW(dsopt_scaler_info, info);
            (void)counted("scaler_decode", dsopt_scaler_decode(host.data(), &info));
            const dsopt_tensor both[] = {owner.state.tensor(entry - 1), tensor}; // loss_scale is the entry before
            const auto *const overflow = static_cast<const int32_t *>(words({choose.below(2)}));
            (void)counted("scaler_update_arrays",
                          dsopt_scaler_update_arrays(scaler_, both, 2, choose.flip() ? overflow : nullptr, nullptr));
        }
    }

    const Case case_;
    Echo echo_;
    const dsopt_optimizer *opt_ = nullptr;
    dsopt_optimizer *twin_ = nullptr;
    const dsopt_scaler *scaler_ = nullptr;
    const Arrays *weights_ = nullptr; // the twin's
    std::vector<std::string> names_;  // of state tensors
};

} // namespace
} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz::count_runs();
    fuzz::Functional(fuzz::Choices(data, size)).run();
    return 0;
}
