// SPDX-License-Identifier: Apache-2.0
#include "subject.h"

namespace fuzz {
namespace {

struct Kind {
    int32_t algorithm;
    int ranks = 1;
    uint32_t flags = 0; // of the optimizer
    int32_t compat = DSOPT_COMPAT_NONE;
    bool is_16_bit = false, scaler = false, masks = false, clips = false, node = false;
    int32_t first_format = DSOPT_MOMENT_F32, second_format = DSOPT_MOMENT_F32; // of the moments
    bool remainders = false, f32_moments = false;                              // f32_moments: of the first parameter
    bool two_blocks = false;                                                   // the last parameter has two scales
    bool long_list = false;                                                    // of several parts of sharded state
    int32_t schedule = DSOPT_NS_CONSTANT;                                      // of Muon
};
constexpr uint32_t kAverages = DSOPT_OPTIMIZER_AVERAGES;
constexpr uint32_t kShards = DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_SHARD_NODE;
constexpr uint32_t kSplits = DSOPT_OPTIMIZER_SPLIT_MATRICES;
constexpr uint32_t kOfRanks = kAverages | kShards | kSplits | DSOPT_OPTIMIZER_MOMENTUM_BITS; // with several ranks only
const Kind kAll[] = {
    {DSOPT_ALGORITHM_ADAMW},
    {.algorithm = DSOPT_ALGORITHM_ADAMW,
     .flags = DSOPT_OPTIMIZER_ACCUMULATE,
     .is_16_bit = true,
     .scaler = true,
     .clips = true},
    {DSOPT_ALGORITHM_LAMB},
    {DSOPT_ALGORITHM_SGD},
    {DSOPT_ALGORITHM_ADAGRAD},
    {DSOPT_ALGORITHM_LION},
    {.algorithm = DSOPT_ALGORITHM_ADAM, .compat = DSOPT_COMPAT_DEEPSPEED, .is_16_bit = true, .scaler = true},
    {.algorithm = DSOPT_ALGORITHM_ADAMW,
     .flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING,
     .is_16_bit = true},
    {DSOPT_ALGORITHM_ONEBIT_ADAM},
    {DSOPT_ALGORITHM_ZERO_ONE_ADAM},
    {DSOPT_ALGORITHM_ONEBIT_LAMB},
    {DSOPT_ALGORITHM_ONEBIT_ADAM, 3, kAverages},
    {DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3, kAverages},
    {DSOPT_ALGORITHM_ONEBIT_LAMB, 3, kAverages},
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM, .ranks = 2, .flags = kAverages, .masks = true},
    {.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM, .ranks = 2, .flags = kAverages, .is_16_bit = true, .scaler = true},
    {DSOPT_ALGORITHM_ONEBIT_ADAM, 2, kAverages | DSOPT_OPTIMIZER_MOMENTUM_BITS},
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM, .ranks = 4, .flags = kAverages, .node = true},
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB, .ranks = 2, .compat = DSOPT_COMPAT_DEEPSPEED},
    {.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM, .ranks = 2, .compat = DSOPT_COMPAT_DEEPSPEED},
    {.algorithm = DSOPT_ALGORITHM_ADAMW, .two_blocks = true},
    {.algorithm = DSOPT_ALGORITHM_ADAMW,
     .first_format = DSOPT_MOMENT_Q8,
     .second_format = DSOPT_MOMENT_Q8,
     .f32_moments = true,
     .two_blocks = true},
    {.algorithm = DSOPT_ALGORITHM_ADAMW,
     .is_16_bit = true,
     .scaler = true,
     .first_format = DSOPT_MOMENT_E4M3,
     .second_format = DSOPT_MOMENT_BF16_RANDOM,
     .remainders = true,
     .two_blocks = true},
    {.algorithm = DSOPT_ALGORITHM_ADAMW,
     .is_16_bit = true,
     .scaler = true,
     .first_format = DSOPT_MOMENT_BF16,
     .second_format = DSOPT_MOMENT_Q8,
     .two_blocks = true},
    {.algorithm = DSOPT_ALGORITHM_LAMB,
     .flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING,
     .is_16_bit = true,
     .first_format = DSOPT_MOMENT_Q8,
     .second_format = DSOPT_MOMENT_BF16_RANDOM,
     .two_blocks = true},
    {.algorithm = DSOPT_ALGORITHM_SGD,
     .flags = DSOPT_OPTIMIZER_ACCUMULATE,
     .is_16_bit = true,
     .first_format = DSOPT_MOMENT_E4M3,
     .remainders = true},
    {.algorithm = DSOPT_ALGORITHM_ADAGRAD, .second_format = DSOPT_MOMENT_BF16_RANDOM},
    {.algorithm = DSOPT_ALGORITHM_ADAMW, .ranks = 2, .flags = DSOPT_OPTIMIZER_SHARD, .long_list = true},
    {.algorithm = DSOPT_ALGORITHM_LION,
     .ranks = 3,
     .flags = DSOPT_OPTIMIZER_SHARD | kAverages,
     .is_16_bit = true,
     .scaler = true,
     .first_format = DSOPT_MOMENT_Q8,
     .long_list = true},
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM,
     .ranks = 4,
     .flags = DSOPT_OPTIMIZER_SHARD_NODE | kAverages,
     .node = true},
    {.algorithm = DSOPT_ALGORITHM_MUON},
    {.algorithm = DSOPT_ALGORITHM_MUON,
     .flags = DSOPT_OPTIMIZER_ACCUMULATE,
     .is_16_bit = true,
     .scaler = true,
     .first_format = DSOPT_MOMENT_BF16_RANDOM,
     .remainders = true,
     .schedule = DSOPT_NS_POLAR_EXPRESS},
    {.algorithm = DSOPT_ALGORITHM_MUON, .ranks = 2, .flags = DSOPT_OPTIMIZER_SHARD},
    {.algorithm = DSOPT_ALGORITHM_MUON,
     .ranks = 2,
     .flags = kSplits | kAverages,
     .is_16_bit = true,
     .schedule = DSOPT_NS_YOU},
};
static_assert(std::size(kAll) == kKinds);

constexpr int64_t kSizes[] = {5, 0, 33, 70}, kTwoBlocks = 300, kLong = 4200;
constexpr int64_t kDims[] = {3, 11}; // of the third parameter
/// The first two parameters of Muon: one matrix, and three in a flat parameter.
constexpr int64_t kMatrix[] = {16, 17}, kRows = 4, kCols = 6;
constexpr int64_t kMatrixSizes[] = {kMatrix[0] * kMatrix[1], 3 * kRows *kCols};
const char *const kNames[] = {"w.a", "b\"\u00e9", "w.c", "d"};

/// Shared by all subjects, because detecting the processor's features takes longer than a load.
const test::Context &context() {
    static const test::Context one = test::make_context(1);
    return one;
}

bool is_onebit(int32_t algorithm) { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }
bool is_muon(const Kind &kind) { return kind.algorithm == DSOPT_ALGORITHM_MUON; }

/// The second group of Muon is of AdamW.
dsopt_group group_of(const Kind &kind, bool second) {
    dsopt_group group;
    must("group_init", dsopt_group_init(&group, sizeof group,
                                        is_muon(kind) && second ? int32_t(DSOPT_ALGORITHM_ADAMW) : kind.algorithm));
    if (group.algorithm == DSOPT_ALGORITHM_MUON && kind.schedule != DSOPT_NS_CONSTANT) {
        group.ns_schedule = kind.schedule;
        group.ns_a = group.ns_b = group.ns_c = 0;
        group.flags = DSOPT_GROUP_NESTEROV;
    }
    group.weight_decay = 0.01;
    group.exp_avg_format = kind.first_format;
    group.exp_avg_sq_format = kind.second_format;
    if (kind.algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.9;
    if (is_onebit(kind.algorithm)) group.freeze_step = 3;
    if (kind.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
        group.var_interval_steps = 1;
        group.local_interval_steps = 2;
        group.max_local_interval = 4;
    }
    return group;
}

} // namespace

bool Subject::is_sharded(int kind) { return (kAll[kind].flags & kShards) != 0; }

std::vector<int> Subject::rank_counts(int kind) {
    if (kAll[kind].flags & DSOPT_OPTIMIZER_SHARD) return {1, 2, 3};
    const bool has_formats =
        kAll[kind].first_format != DSOPT_MOMENT_F32 || kAll[kind].second_format != DSOPT_MOMENT_F32;
    if (!is_onebit(kAll[kind].algorithm)) return has_formats ? std::vector<int>{2} : std::vector<int>{};
    return kAll[kind].node ? std::vector<int>{4} : std::vector<int>{1, 2, 3};
}

Subject::Subject(int index, int rank, int ranks) : kind_(index) {
    const Kind &kind = kAll[index];
    if (ranks == 0) ranks = kind.ranks;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.compat = kind.compat;
    desc.flags = int32_t(ranks == 1 ? kind.flags & ~kOfRanks : kind.flags);
    desc.max_norm = kind.clips ? 1 : 0;
    if (kind.remainders) desc.masters = DSOPT_MASTERS_REMAINDER;
    echo_ = kind.node ? Echo{rank / 2, 2} : Echo{rank, ranks};
    if (kind.node) {
        node_echo_ = {rank % 2, 2};
        node_ = echo_comm(context(), node_echo_);
    }
    if (ranks > 1) comm_ = echo_comm(context(), echo_);
    if (kind.scaler) scaler_ = test::make_scaler(context(), 256, 2);
    desc.data = comm_.get();
    desc.node = node_.get();
    desc.scaler = scaler_.get();
    dsopt_optimizer *optimizer = nullptr;
    must("optimizer_create", dsopt_optimizer_create(context().get(), &desc, &optimizer));
    optimizer_.reset(optimizer);
    std::vector<dsopt_param> params;
    for (size_t i = 0; i < std::size(kSizes); ++i) {
        const bool is_matrix = is_muon(kind) && i < std::size(kMatrixSizes);
        const auto numel = size_t(is_matrix         ? kMatrixSizes[i]
                                  : i != 3          ? kSizes[i]
                                  : kind.two_blocks ? kTwoBlocks
                                  : kind.long_list  ? kLong
                                                    : kSizes[3]);
        const bool is_bf16 = kind.remainders || (kind.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) != 0;
        const int32_t dtype = !kind.is_16_bit         ? DSOPT_DTYPE_F32
                              : is_bf16 || i % 2 != 0 ? DSOPT_DTYPE_BF16
                                                      : DSOPT_DTYPE_F16;
        weights_.emplace_back(numel * size_of(dtype));
        gradients_.emplace_back(numel * sizeof(float));
        for (size_t k = 0; k < numel; ++k) {
            test::store(&weights_[i][k * size_of(dtype)], dtype, float(int(k % 7) - 3) * 0.25f);
            test::store(&gradients_[i][k * sizeof(float)], DSOPT_DTYPE_F32,
                        float(int(k * 31 + i * 7) % 13 - 6) * 0.125f);
        }
        dsopt_param param{};
        param.tensor = {numel != 0 ? weights_[i].data() : nullptr, int64_t(numel), dtype, 0};
        param.name = kNames[i];
        if (is_matrix && i == 0) param.dims = kMatrix, param.ndim = 2;
        if (is_matrix && i == 1) {
            param.rows = kRows;
            param.cols = kCols;
            param.flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
        }
        if (i == 2) param.dims = kDims, param.ndim = 2;
        if (i == 0 && kind.f32_moments) param.flags = DSOPT_PARAM_F32_MOMENTS;
        if (i == 3 && kind.masks) param.flags = DSOPT_PARAM_MASKED;
        params.push_back(param);
        list_.push_back({numel != 0 ? gradients_[i].data() : nullptr, int64_t(numel), DSOPT_DTYPE_F32, 0});
    }
    dsopt_group group = group_of(kind, false);
    for (size_t first : {0, 2}) {
        if (first != 0 && is_muon(kind)) group = group_of(kind, true);
        must("add_group", dsopt_optimizer_add_group(optimizer_.get(), &group, &params[first], 2));
    }
    steps_ = kind.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? 5 : 4;
}

void Subject::train() {
    for (int64_t i = 0; i < steps_; ++i) must("step", step());
}

dsopt_status Subject::step() {
    DSOPT_NEW(dsopt_step, step);
    step.grads = list_.data();
    step.count = int64_t(list_.size());
    return counted("step", dsopt_optimizer_step(optimizer_.get(), &step));
}

Bytes Subject::save(uint32_t flags) {
    Bytes file;
    DSOPT_NEW(dsopt_io, io);
    io.flags = int32_t(flags);
    io.user = &file;
    io.write = append;
    must("save", dsopt_optimizer_save(optimizer_.get(), nullptr, &io));
    return file;
}

dsopt_status Subject::load(std::vector<Bytes> &files, bool as_list, uint32_t flags) {
    std::vector<void *> users;
    std::vector<uint64_t> totals;
    for (Bytes &file : files) {
        users.push_back(&file);
        totals.push_back(file.size());
    }
    DSOPT_NEW(dsopt_io, io);
    io.flags = int32_t(flags);
    io.read = read_at;
    io.user = users[0];
    io.total = totals[0];
    if (as_list) {
        io.user = nullptr;
        io.total = 0;
        io.files = int32_t(files.size());
        io.users = users.data();
        io.totals = totals.data();
    }
    return counted("load", dsopt_optimizer_load(optimizer_.get(), nullptr, &io));
}

void Subject::query_reduction(int64_t call) {
    int32_t reduction = 0;
    (void)counted("next_reduction", dsopt_optimizer_next_reduction(optimizer_.get(), call, &reduction));
}

void Subject::copy_as_f32() {
    int64_t count = 0;
    must("state_count", dsopt_optimizer_state_count(optimizer_.get(), &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must("state", dsopt_optimizer_state(optimizer_.get(), i, &info));
        if (info.tensor.dtype == DSOPT_DTYPE_I32) continue;
        std::vector<float> values(size_t(info.tensor.numel));
        must("export_f32", dsopt_optimizer_export_f32(optimizer_.get(), i, values.data(), info.tensor.numel));
        must("import_f32", dsopt_optimizer_import_f32(optimizer_.get(), i, values.data(), info.tensor.numel));
    }
}

const Subject::Keys &Subject::keys() const {
    static Keys all[kKinds];
    Keys &keys = all[kind_];
    if (!keys.empty()) return keys;
    for (int32_t group = DSOPT_ALL_GROUPS; group < 2; ++group)
        for (int32_t key = 1; key <= DSOPT_KEY_SKIP_BUDGET; ++key) {
            double value = 0;
            if (dsopt_optimizer_get(optimizer_.get(), group, key, &value) == DSOPT_OK) keys.push_back({group, key});
        }
    return keys;
}
Bytes Subject::text(bool state) {
    Bytes all;
    const auto add = [&](const void *data, size_t bytes) { all.append(static_cast<const char *>(data), bytes); };
    int64_t count = 0;
    must("state_count", dsopt_optimizer_state_count(optimizer_.get(), &count));
    for (int64_t i = 0; state && i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must("state", dsopt_optimizer_state(optimizer_.get(), i, &info));
        const size_t bytes = size_t(info.tensor.numel) * size_of(info.tensor.dtype), at = all.size();
        all.resize(at + bytes);
        must("export", dsopt_optimizer_export(optimizer_.get(), i, &all[at], bytes));
    }
    for (const auto &[group, key] : keys()) {
        double value = 0;
        must("get", dsopt_optimizer_get(optimizer_.get(), group, key, &value));
        add(&value, sizeof value);
    }
    DSOPT_NEW(dsopt_report, report);
    must("report", dsopt_optimizer_report(optimizer_.get(), &report));
    report.state_bytes = report.workspace_bytes = 0;
    add(&report, sizeof report);
    if (scaler_ != nullptr) {
        const dsopt_scaler_info info = test::info_of(scaler_);
        add(&info, sizeof info);
    }
    for (const std::vector<char> &weights : weights_) add(weights.data(), weights.size());
    return all;
}

} // namespace fuzz
