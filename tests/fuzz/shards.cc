// SPDX-License-Identifier: Apache-2.0
// Compares trainings of several ranks, whose state is sharded, with the same training on one rank that has all of the
// state. After some steps all ranks save, and another number of ranks loads the files and goes on. After each step and
// each load every bit of weights, state and report must be the same.
#include "harness.h"
#include "support/memory.h"
#include "support/numbers.h"
#include <cmath>
#include <mutex>
#include <optional>

namespace fuzz {
namespace {

using test::Block;

// -------------------------------------------------------------------------------------------------------------- a case
constexpr int32_t kAlgorithms[] = {DSOPT_ALGORITHM_ADAM,        DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
                                   DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_ALGORITHM_SGD,   DSOPT_ALGORITHM_ADAGRAD,
                                   DSOPT_ALGORITHM_LION,        DSOPT_ALGORITHM_MUON};
// Next to the edges of a block of scales, of a leaf, and of the places at which tensors begin.
constexpr int64_t kSizes[] = {0, 1, 2, 31, 33, 63, 64, 65, 255, 256, 257, 700, 4095, 4096, 4097, 8192, 9000, 12345};
constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16};
constexpr double kRates[] = {1e-3, 1e-2, 0.1, 3e-4, 0};
constexpr double kGradients[] = {1, 1, 0.01, 1e-6, 50}; // largest magnitudes
constexpr float kPoisons[] = {test::kInf, -test::kInf, test::kNaN};
// '@' separates a tensor's name from the first element of a piece of it in files.
constexpr const char *kNames[] = {"w", "w@", "w.exp_avg@", "optimizer.", "\"\\\n"};

enum class Absent : uint8_t { Nowhere, Everywhere, OnOneRank };
struct ParamCase {
    std::string name;
    int64_t numel;
    int32_t dtype, gradient, flags;
    size_t group;
    double size; // of its gradients
    Cut cut = {};
};
struct StepCase {
    uint64_t seed = 0;
    std::optional<double> lr;               // set from this step on
    std::optional<float> own_lr, own_scale; // of this step alone
    bool skips = false, zeroes = false;
    std::vector<Absent> absent;
    int odd_rank = 0, poisoned = -1; // the parameter with a poison on this rank, -1 = none
    float poison = 0;
};
struct Topology {
    int per_node = 1, nodes = 1;
    int32_t flag = 0; // of dsopt_optimizer_desc; 0: each rank has all of the state
    bool has_data = true;
    bool has_node() const { return per_node > 1 || flag == DSOPT_OPTIMIZER_SHARD_NODE; }
    int ranks() const { return per_node * nodes; }
    /// True if a rank has all of the state.
    bool is_whole() const { return flag == 0 || flag == DSOPT_OPTIMIZER_SPLIT_MATRICES || ranks() == 1; }
    std::string text() const {
        return std::to_string(nodes) + " nodes of " + std::to_string(per_node) +
               (flag == DSOPT_OPTIMIZER_SHARD            ? " SHARD"
                : flag == DSOPT_OPTIMIZER_SHARD_NODE     ? " SHARD_NODE"
                : flag == DSOPT_OPTIMIZER_SPLIT_MATRICES ? " SPLIT_MATRICES"
                                                         : " unsharded");
    }
};
/// Ranks that load the files of the stage before, make steps, and save.
struct StageCase {
    Topology topology;
    int threads = 1; // of each rank
    std::vector<StepCase> steps;
    int32_t load_flags = 0;
    uint64_t order = 0; // of the files; 0: by rank
    bool one_file = false;
};
struct Case {
    int32_t flags = 0, rank_flags = 0, nonfinite = 0, masters = 0;
    double max_norm = 0, max_value = 0;
    bool scaler = false, saves_params = false;
    std::vector<dsopt_group> groups;
    std::vector<ParamCase> params;
    std::vector<StageCase> stages;
    bool averages() const { return (rank_flags & DSOPT_OPTIMIZER_AVERAGES) != 0; }
    /// True if an Inf or NaN in a gradient skips the step.
    bool checks() const {
        return nonfinite == DSOPT_NONFINITE_SKIP || (nonfinite == DSOPT_NONFINITE_AUTO && (scaler || max_norm != 0));
    }
    bool has_muon() const {
        return std::any_of(groups.begin(), groups.end(),
                           [](const dsopt_group &group) { return group.algorithm == DSOPT_ALGORITHM_MUON; });
    }
    /// True if a load writes the weight, also without DSOPT_IO_PARAMS.
    bool is_in_master(const ParamCase &param) const {
        return masters == DSOPT_MASTERS_REMAINDER && param.dtype == DSOPT_DTYPE_BF16;
    }
};

dsopt_group group_of(Choices &choose, const Case &c) {
    dsopt_group group;
    must("group_init", dsopt_group_init(&group, sizeof group, choose.of(kAlgorithms)));
    const int32_t algorithm = group.algorithm;
    if (algorithm == DSOPT_ALGORITHM_MUON) choose_iterations(choose, group);
    group.lr = choose.of(kRates);
    if (choose.flip()) group.weight_decay = 0.1;
    if (choose.rarely(4)) group.max_norm = choose.flip() ? 0.5 : 10;
    if (algorithm == DSOPT_ALGORITHM_SGD && choose.flip()) {
        group.momentum = 0.9;
        if (choose.flip()) group.flags |= DSOPT_GROUP_NESTEROV;
    }
    const bool has_moments = algorithm != DSOPT_ALGORITHM_SGD || group.momentum != 0;
    if (c.masters != DSOPT_MASTERS_FLAT && has_moments && choose.flip()) {
        const Formats formats = formats_of(algorithm, choose.below(kFormatChoices));
        group.exp_avg_format = formats.first;
        group.exp_avg_sq_format = formats.second;
    }
    return group;
}
ParamCase param_of(Choices &choose, const Case &c, int index) {
    ParamCase param;
    param.name = choose.of(kNames) + std::to_string(choose.flip() ? index : 4096 * index);
    param.numel = choose.of(kSizes);
    param.dtype = choose.of(kDtypes);
    const bool has_f16 = c.masters != DSOPT_MASTERS_REMAINDER && !(c.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING);
    if (!has_f16 && param.dtype == DSOPT_DTYPE_F16) param.dtype = DSOPT_DTYPE_BF16;
    param.gradient = choose.of(kDtypes);
    param.group = size_t(choose.below(int(c.groups.size())));
    param.size = choose.of(kGradients);
    const dsopt_group &group = c.groups[param.group];
    param.flags = 0;
    if ((group.exp_avg_format != 0 || group.exp_avg_sq_format != 0) && choose.rarely(4))
        param.flags |= DSOPT_PARAM_F32_MOMENTS;
    if (group.algorithm == DSOPT_ALGORITHM_MUON) {
        param.cut = cut_of(choose);
        param.numel = param.cut.numel;
    }
    return param;
}
StepCase step_of(Choices &choose, const Case &c, const Topology &topology) {
    StepCase step;
    step.seed = choose.byte();
    if (choose.rarely(3)) step.lr = choose.of(kRates);
    if (choose.rarely(4)) step.own_lr = float(choose.of(kRates));
    if (choose.rarely(5)) step.own_scale = 4.0f;
    step.skips = choose.rarely(10);
    step.zeroes = choose.rarely(4);
    step.odd_rank = choose.below(topology.ranks());
    for (size_t i = 0; i < c.params.size(); ++i)
        step.absent.push_back(!choose.rarely(6)               ? Absent::Nowhere
                              : c.averages() && choose.flip() ? Absent::OnOneRank
                                                              : Absent::Everywhere);
    if (c.checks() && choose.rarely(5)) {
        step.poisoned = choose.below(int(c.params.size()));
        step.poison = choose.of(kPoisons);
    }
    return step;
}
Topology topology_of(Choices &choose, const Case &c) {
    constexpr Topology shapes[] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {1, 6}, {2, 1},
                                   {3, 1}, {5, 1}, {2, 2}, {3, 2}, {2, 3}, {2, 2}, {2, 3}};
    constexpr int32_t flags[] = {DSOPT_OPTIMIZER_SHARD, DSOPT_OPTIMIZER_SHARD, DSOPT_OPTIMIZER_SHARD_NODE,
                                 DSOPT_OPTIMIZER_SPLIT_MATRICES, 0};
    Topology topology = choose.of(shapes);
    topology.flag = choose.of(flags);
    if (topology.flag == DSOPT_OPTIMIZER_SPLIT_MATRICES && !c.has_muon()) topology.flag = DSOPT_OPTIMIZER_SHARD;
    if (topology.nodes == 1 && topology.has_node()) topology.has_data = choose.flip();
    return topology;
}
Case case_of(Choices &choose) {
    Case c;
    switch (choose.below(6)) {
    case 0: c.masters = DSOPT_MASTERS_FLAT; break;
    case 1: c.flags |= DSOPT_OPTIMIZER_NO_MASTER; break;
    case 2: c.flags |= DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING; break;
    case 3:
    case 4: c.masters = DSOPT_MASTERS_REMAINDER; break;
    default: break;
    }
    if (choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
    if (choose.flip()) c.rank_flags |= DSOPT_OPTIMIZER_AVERAGES;
    if (choose.rarely(3)) c.rank_flags |= DSOPT_OPTIMIZER_CHECK_RANKS;
    c.nonfinite = choose.below(3);
    if (choose.rarely(2)) c.max_norm = choose.flip() ? 1 : 0.01;
    if (choose.rarely(5)) c.max_value = 0.25;
    c.scaler = choose.rarely(3);
    c.saves_params = choose.flip();
    for (int groups = 1 + choose.below(3); groups > 0; --groups) c.groups.push_back(group_of(choose, c));
    const int params = 1 + choose.below(8);
    for (int i = 0; i < params; ++i) c.params.push_back(param_of(choose, c, i));
    if (choose.flip()) // otherwise the groups alternate
        std::stable_sort(c.params.begin(), c.params.end(),
                         [](const ParamCase &a, const ParamCase &b) { return a.group < b.group; });
    const int stages = 1 + choose.below(3);
    for (int s = 0; s < stages; ++s) {
        StageCase stage;
        stage.topology = topology_of(choose, c);
        stage.threads = choose.rarely(4) ? 2 : 1;
        for (int steps = choose.below(4) + (s == 0); steps > 0; --steps)
            stage.steps.push_back(step_of(choose, c, stage.topology));
        if (c.saves_params && !choose.rarely(4)) stage.load_flags = DSOPT_IO_PARAMS;
        stage.order = choose.flip() ? choose.byte() : 0;
        stage.one_file = choose.flip();
        c.stages.push_back(stage);
    }
    return c;
}
std::string text_of(const Case &c) {
    std::string text = "flags " + std::to_string(c.flags | c.rank_flags) + " masters " + std::to_string(c.masters) +
                       " nonfinite " + std::to_string(c.nonfinite) + " max_norm " + std::to_string(c.max_norm) +
                       " max_value " + std::to_string(c.max_value) + " scaler " + std::to_string(c.scaler) +
                       " saves_params " + std::to_string(c.saves_params);
    for (const dsopt_group &group : c.groups)
        text += "\n  group: algorithm " + std::to_string(group.algorithm) + " formats " +
                std::to_string(group.exp_avg_format) + " " + std::to_string(group.exp_avg_sq_format) + " max_norm " +
                std::to_string(group.max_norm);
    for (const ParamCase &p : c.params)
        text += "\n  parameter '" + p.name + "': " + std::to_string(p.numel) + " " + test::dtype_name(p.dtype) +
                ", gradient " + test::dtype_name(p.gradient) + ", group " + std::to_string(p.group) + " flags " +
                std::to_string(p.flags);
    for (const StageCase &stage : c.stages)
        text += "\n  stage: " + stage.topology.text() + ", " + std::to_string(stage.steps.size()) + " steps, loads " +
                std::to_string(stage.load_flags) + (stage.one_file ? " of one file" : "");
    return text;
}

// ----------------------------------------------------------------------------------------------------------- gradients
/// The gradients of a step of one rank. Those that are absent have no bytes.
using Gradients = std::vector<std::optional<Bytes>>;

Bytes numbers(uint64_t seed, int64_t numel, int32_t dtype, double size) {
    test::Random random(seed);
    Bytes bytes(size_t(numel) * size_of(dtype), 0);
    for (int64_t i = 0; i < numel; ++i)
        test::store(&bytes[size_t(i) * size_of(dtype)], dtype, float(random.uniform(-size, size)));
    return bytes;
}
/// Returns the gradients that a rank passes. All ranks pass the same ones unless the step averages them.
Gradients gradients_of(const Case &c, const StepCase &step, int rank) {
    Gradients list;
    for (size_t i = 0; i < c.params.size(); ++i) {
        const ParamCase &param = c.params[i];
        list.emplace_back();
        const bool is_odd = !c.averages() || rank == step.odd_rank;
        if (step.absent[i] == Absent::Everywhere || (step.absent[i] == Absent::OnOneRank && is_odd)) continue;
        list.back() = numbers(1000 * step.seed + 100 * uint64_t(c.averages() ? rank : 0) + i, param.numel,
                              param.gradient, param.size);
        if (step.poisoned == int(i) && is_odd && param.numel != 0)
            test::store(&(*list.back())[size_t(param.numel / 2) * size_of(param.gradient)], param.gradient,
                        step.poison);
    }
    return list;
}
/// Returns the mean over all ranks in F32: the ranks of a node are added up in order, then the nodes.
Gradients mean_of(const Case &c, const Topology &topology, const std::vector<Gradients> &of_ranks) {
    Gradients means;
    for (size_t i = 0; i < c.params.size(); ++i) {
        const ParamCase &param = c.params[i];
        const size_t numel = size_t(param.numel);
        const auto value = [&](int d, int l, size_t k) {
            const std::optional<Bytes> &gradient = of_ranks[size_t(l * topology.nodes + d)][i];
            return gradient ? test::loaded(&(*gradient)[k * size_of(param.gradient)], param.gradient) : 0;
        };
        Bytes mean(numel * sizeof(float), 0);
        for (size_t k = 0; k < numel; ++k) {
            float total = 0;
            for (int d = 0; d < topology.nodes; ++d) {
                float of_node = value(d, 0, k);
                for (int l = 1; l < topology.per_node; ++l) of_node += value(d, l, k);
                total = d == 0 ? of_node : total + of_node;
            }
            test::store(&mean[k * sizeof(float)], DSOPT_DTYPE_F32, total * (1.0f / float(topology.ranks())));
        }
        means.emplace_back(std::move(mean));
    }
    return means;
}

// ----------------------------------------------------------------------------------------------------------- trainings
/// Returns the context of one thread or that of two. They are created once, because this takes as long as a step.
const test::Context &context_of(int threads) {
    static const test::Context one = test::make_context(test::context_desc(1, DSOPT_BACKEND_CPU)),
                               two = test::make_context(test::context_desc(2, DSOPT_BACKEND_CPU));
    return threads == 1 ? one : two;
}

const test::Memory &memory() {
    static const test::Memory host = test::host_memory();
    return host;
}

/// Comms of a rank. One that the optimizer does not get is NULL.
struct Comms {
    test::Comm data, node;
};

/// Everything that must be the same after a step or a load.
struct Snapshot {
    struct Entry {
        std::string name;
        int64_t param, numel;
        Bytes bytes;
    };
    std::vector<Bytes> weights;
    std::vector<Entry> state;
    dsopt_report report{};
};

/// An optimizer with its weights: the reference, or one rank.
class Training {
public:
    Training(const Case &c, int threads, const Topology *topology, Comms comms, std::string where) :
        case_(c),
        where_(std::move(where)),
        context_(context_of(threads)),
        comms_(std::move(comms)) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = c.flags | (topology != nullptr ? c.rank_flags | topology->flag : 0);
        desc.nonfinite = c.nonfinite;
        desc.masters = c.masters;
        desc.max_norm = c.max_norm;
        desc.max_value = c.max_value;
        desc.seed = 5;
        desc.data = comms_.data.get();
        desc.node = comms_.node.get();
        if (c.scaler) scaler_ = test::make_scaler(context_, 64, 2);
        desc.scaler = scaler_.get();
        dsopt_optimizer *made = nullptr;
        check("optimizer_create", dsopt_optimizer_create(context_.get(), &desc, &made));
        optimizer_.reset(made);
        for (const dsopt_group &group : c.groups)
            check("add_group", dsopt_optimizer_add_group(made, &group, nullptr, 0));
        std::vector<dsopt_param> params;
        for (const ParamCase &p : c.params) {
            weights_.emplace_back(memory(), size_t(p.numel) * size_of(p.dtype), weights_.size() % 3 * size_of(p.dtype));
            weights_.back().set(numbers(weights_.size(), p.numel, p.dtype, 1));
            dsopt_param param{};
            param.tensor = {weights_.back().data(), p.numel, p.dtype, 0};
            param.name = p.name.c_str();
            param.flags = p.flags;
            param.group = int32_t(p.group);
            p.cut.describe(param);
            params.push_back(param);
        }
        check("add_params", dsopt_optimizer_add_params(made, params.data(), int64_t(params.size())));
    }
    void set_weight(size_t i, const Bytes &bytes) { weights_[i].set(bytes); }
    void be_at(const std::string &where) { where_ = where; }

    void step(const StepCase &s, const Gradients &gradients, bool are_means) {
        std::vector<Block> blocks;
        std::vector<dsopt_tensor> list;
        for (size_t i = 0; i < gradients.size(); ++i) {
            const int64_t numel = case_.params[i].numel;
            const int32_t dtype = are_means ? int32_t(DSOPT_DTYPE_F32) : case_.params[i].gradient;
            blocks.emplace_back(memory(), size_t(numel) * size_of(dtype), s.seed % 5 * size_of(dtype));
            if (gradients[i]) blocks.back().set(*gradients[i]);
            list.push_back({gradients[i] ? blocks.back().data() : nullptr, numel, dtype, 0});
        }
        if (s.lr) check("set", dsopt_optimizer_set(optimizer_.get(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, *s.lr));
        const std::vector<float> rates(case_.groups.size(), s.own_lr.value_or(0));
        const float scale = s.own_scale.value_or(1);
        const int32_t skips = 1;
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        if (s.zeroes) step.flags = DSOPT_STEP_ZERO_GRADS;
        if (s.own_lr) step.lr = rates.data();
        if (s.own_scale) step.grad_scale = &scale;
        if (s.skips) step.skip = &skips;
        check("step", dsopt_optimizer_step(optimizer_.get(), &step));
        for (size_t i = 0; i < gradients.size(); ++i)
            if (gradients[i] && blocks[i].text() != (s.zeroes ? Bytes(blocks[i].bytes(), 0) : *gradients[i]))
                differs("gradient of " + text_of_param(int64_t(i)));
    }
    Bytes save(bool params) {
        Bytes file;
        DSOPT_NEW(dsopt_io, io);
        io.flags = params ? DSOPT_IO_PARAMS : 0;
        io.user = &file;
        io.write = append;
        check("save", dsopt_optimizer_save(optimizer_.get(), nullptr, &io));
        return file;
    }
    /// `alone`: the first file is enough, because the ranks that saved each had all of the state.
    void load(const std::vector<const Bytes *> &files, bool alone, int32_t flags) {
        std::vector<void *> users;
        std::vector<uint64_t> totals;
        for (const Bytes *file : files) {
            users.push_back(const_cast<Bytes *>(file)); // it is only read
            totals.push_back(file->size());
        }
        DSOPT_NEW(dsopt_io, io);
        io.flags = flags;
        io.read = read_at;
        if (alone) {
            io.user = users[0];
            io.total = totals[0];
        } else {
            io.files = int32_t(files.size());
            io.users = users.data();
            io.totals = totals.data();
        }
        check("load", dsopt_optimizer_load(optimizer_.get(), nullptr, &io));
        skipped_ = report().skipped;
    }

    Snapshot snapshot() {
        Snapshot now;
        for (const Block &weight : weights_) now.weights.push_back(weight.text());
        int64_t count = 0;
        check("state_count", dsopt_optimizer_state_count(optimizer_.get(), &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check("state", dsopt_optimizer_state(optimizer_.get(), i, &info));
            Bytes bytes(size_t(info.tensor.numel) * size_of(info.tensor.dtype), 0);
            check("export", dsopt_optimizer_export(optimizer_.get(), i, bytes.data(), bytes.size()));
            now.state.push_back({info.name, info.param, info.tensor.numel, std::move(bytes)});
        }
        now.report = report();
        return now;
    }
    /// Compares weights, this rank's part of the state and, after a step, the report with those of the reference.
    /// `skipped`: the number of skipped steps of the reference when this training began.
    void compare(const Snapshot &wanted, int64_t skipped, bool has_stepped) {
        const Snapshot now = snapshot();
        for (size_t i = 0; i < now.weights.size(); ++i)
            if (now.weights[i] != wanted.weights[i])
                differs("weights of " + text_of_param(int64_t(i)) +
                        text_of_difference(now.weights[i], wanted.weights[i], size_of(case_.params[i].dtype)));
        if (now.state.size() != wanted.state.size()) differs("length of the state list");
        for (size_t i = 0; i < now.state.size(); ++i) compare_entry(int64_t(i), now.state[i], wanted.state[i]);
        if (now.report.calls != wanted.report.calls) differs("dsopt_report.calls");
        if (number(now.report.loss_scale) != number(wanted.report.loss_scale)) differs("dsopt_report.loss_scale");
        if (has_stepped) compare_reports(now.report, wanted.report, skipped);
    }

private:
    void check(const char *call, dsopt_status status) const {
        if (counted(call, status) != DSOPT_OK) fail(std::string(call) + " returns " + dsopt_status_name(status));
    }
    [[noreturn]] void differs(const std::string &what) const { fail("a difference in " + what); }
    [[noreturn]] void fail(const std::string &what) const {
        static std::mutex first; // several ranks may fail at once
        first.lock();
        finding("%s\n%s: %s", text_of(case_).c_str(), where_.c_str(), what.c_str());
    }
    std::string text_of_param(int64_t i) const {
        return i < 0 ? "the optimizer" : "parameter " + std::to_string(i) + " '" + case_.params[size_t(i)].name + "'";
    }
    static std::string text_of_difference(const Bytes &a, const Bytes &b, size_t size) {
        const auto at = size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
        return ", at element " + std::to_string(at / size) + " of " + std::to_string(a.size() / size);
    }
    /// Returns the bits of a number. All NaNs are equal.
    static uint64_t number(double value) { return std::isnan(value) ? 0 : __builtin_bit_cast(uint64_t, value); }
    dsopt_report report() const {
        DSOPT_NEW(dsopt_report, report);
        check("report", dsopt_optimizer_report(optimizer_.get(), &report));
        return report;
    }
    void compare_entry(int64_t index, const Snapshot::Entry &now, const Snapshot::Entry &wanted) const {
        const std::string what = "'" + now.name + "' of " + text_of_param(now.param);
        if (now.name != wanted.name || now.param != wanted.param) differs(what + " in place of '" + wanted.name + "'");
        DSOPT_NEW(dsopt_state_info, info);
        check("state", dsopt_optimizer_state(optimizer_.get(), index, &info));
        int64_t begin = 0, numel = wanted.numel; // elements of the tensor
        if (info.flags & DSOPT_STATE_SHARDED) {
            check("shard", dsopt_optimizer_shard(optimizer_.get(), info.param, -1, &begin, &numel));
            begin /= info.block;
            numel = (numel + info.block - 1) / info.block;
        }
        if (now.numel != numel || begin + numel > wanted.numel) differs("number of elements of " + what);
        const size_t size = size_of(info.tensor.dtype);
        const Bytes part = wanted.bytes.substr(size_t(begin) * size, size_t(numel) * size);
        if (now.bytes != part)
            differs(what + text_of_difference(now.bytes, part, size) + ", which begin at " + std::to_string(begin));
    }
    void compare_reports(const dsopt_report &now, const dsopt_report &wanted, int64_t skipped) const {
        if (now.skipped - skipped_ != wanted.skipped - skipped) differs("dsopt_report.skipped");
        if (now.last_skipped != wanted.last_skipped) differs("dsopt_report.last_skipped");
        if (now.first_bad != wanted.first_bad) differs("dsopt_report.first_bad");
        if (now.kind != wanted.kind) differs("dsopt_report.kind");
        if ((now.reasons & ~DSOPT_SKIP_PEER) != (wanted.reasons & ~DSOPT_SKIP_PEER)) differs("dsopt_report.reasons");
        for (const auto &[name, field] :
             {std::pair("scale_used", &dsopt_report::scale_used), std::pair("grad_norm", &dsopt_report::grad_norm),
              std::pair("dense_norm", &dsopt_report::dense_norm), std::pair("weight_norm", &dsopt_report::weight_norm),
              std::pair("update_norm", &dsopt_report::update_norm), std::pair("divisor", &dsopt_report::divisor)})
            if (number(now.*field) != number(wanted.*field)) differs(std::string("dsopt_report.") + name);
    }

    const Case &case_;
    std::string where_;
    const test::Context &context_;
    Comms comms_;
    test::Scaler scaler_;
    std::vector<Block> weights_;
    test::Optimizer optimizer_;
    int64_t skipped_ = 0; // when this training began
};

// -------------------------------------------------------------------------------------------------------------- stages
/// The gradients of a stage by step and rank, and what the reference has after each step.
struct Expected {
    Snapshot before;
    std::vector<std::vector<Gradients>> gradients;
    std::vector<Snapshot> after;
};
/// Makes the steps of the reference.
Expected expect(const Case &c, const StageCase &stage, Training &reference, Snapshot before) {
    Expected expected;
    expected.before = std::move(before);
    for (const StepCase &step : stage.steps) {
        std::vector<Gradients> of_ranks;
        for (int rank = 0; rank < (c.averages() ? stage.topology.ranks() : 1); ++rank)
            of_ranks.push_back(gradients_of(c, step, rank));
        if (c.averages())
            reference.step(step, mean_of(c, stage.topology, of_ranks), true);
        else
            reference.step(step, of_ranks[0], false);
        expected.after.push_back(reference.snapshot());
        expected.gradients.push_back(std::move(of_ranks));
    }
    return expected;
}
/// Returns the files in the order in which a stage loads them.
std::vector<const Bytes *> list_of(const StageCase &stage, const std::vector<Bytes> &files) {
    std::vector<const Bytes *> list;
    for (const Bytes &file : files) list.push_back(&file);
    test::Random random(stage.order);
    for (size_t i = list.size(); stage.order != 0 && i > 1; --i)
        std::swap(list[i - 1], list[size_t(random.below(int(i)))]);
    return list;
}
/// Runs the ranks of a stage and returns their files.
std::vector<Bytes> run_stage(const Case &c, size_t number, const Expected &expected, const std::vector<Bytes> &files) {
    const StageCase &stage = c.stages[number];
    const Topology &topology = stage.topology;
    std::vector<test::CommId> in_node(size_t(topology.nodes)), between(size_t(topology.per_node));
    for (test::CommId &id : in_node) id = test::new_id();
    for (test::CommId &id : between) id = test::new_id();
    std::vector<Bytes> saved(size_t(topology.ranks()));
    test::run_ranks(topology.ranks(), [&](int rank) {
        const int d = rank % topology.nodes, l = rank / topology.nodes; // as dsopt_optimizer_shard counts ranks
        const test::Context &context = context_of(stage.threads);
        Comms comms;
        if (topology.has_data) comms.data = test::local_comm(context, between[size_t(l)], d, topology.nodes);
        if (topology.has_node()) comms.node = test::local_comm(context, in_node[size_t(d)], l, topology.per_node);
        const std::string where =
            "stage " + std::to_string(number) + " (" + topology.text() + "), rank " + std::to_string(rank) + ", ";
        Training training(c, stage.threads, &topology, std::move(comms), where + "creation");
        const int64_t skipped = expected.before.report.skipped;
        if (number != 0) {
            training.be_at(where + "load");
            for (size_t i = 0; i < c.params.size(); ++i) {
                const ParamCase &param = c.params[i];
                const bool is_loaded = (stage.load_flags & DSOPT_IO_PARAMS) != 0 || c.is_in_master(param);
                training.set_weight(i, is_loaded ? numbers(uint64_t(777 + rank), param.numel, param.dtype, 9)
                                                 : expected.before.weights[i]);
            }
            const bool alone = stage.one_file && c.stages[number - 1].topology.is_whole();
            training.load(list_of(stage, files), alone, stage.load_flags);
            training.compare(expected.before, skipped, false);
        }
        for (size_t k = 0; k < stage.steps.size(); ++k) {
            training.be_at(where + "step " + std::to_string(k));
            const std::vector<Gradients> &of_ranks = expected.gradients[k];
            training.step(stage.steps[k], of_ranks[c.averages() ? size_t(rank) : 0], false);
            training.compare(expected.after[k], skipped, true);
        }
        if (number + 1 == c.stages.size()) return; // nobody would load the files
        training.be_at(where + "save");
        saved[size_t(rank)] = training.save(c.saves_params);
    });
    return saved;
}

} // namespace
} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz::count_runs();
    fuzz::Choices choose(data, size);
    const fuzz::Case c = fuzz::case_of(choose);
    fuzz::Training reference(c, 1, nullptr, {}, "the reference");
    fuzz::Snapshot last = reference.snapshot();
    std::vector<fuzz::Bytes> files;
    for (size_t s = 0; s < c.stages.size(); ++s) {
        const fuzz::Expected expected = fuzz::expect(c, c.stages[s], reference, std::move(last));
        files = fuzz::run_stage(c, s, expected, files);
        last = expected.after.empty() ? expected.before : expected.after.back();
    }
    return 0;
}
