// SPDX-License-Identifier: Apache-2.0
#include "creation.h"

namespace fuzz {

void set_formats(dsopt_group &group, Formats formats) {
    group.exp_avg_format = formats.first;
    group.exp_avg_sq_format = formats.second;
    if (group.algorithm == DSOPT_ALGORITHM_SGD && !formats.are_f32()) group.momentum = 0.9;
}

void Creation::create_context() {
    if (contexts.size() == 3) return;
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.backend = backend;
    desc.threads = choose.below(4);
    desc.log_level = choose.below(5);
    desc.allocate = Hook::allocate;
    desc.release = Hook::release;
    desc.log = [](void *, int32_t, const char *) {};
    if (choose.rarely(4)) desc.parallel_for = run_backwards;
    if (choose.rarely(8)) desc.chunk = 8192;
    if (choose.rarely(16)) break_one({&desc.threads, &desc.log_level, &desc.flags, &desc.reserved});
    if (choose.rarely(32)) desc.backend = 7;
    if (choose.rarely(32)) desc.device = 99;
    if (choose.rarely(32)) desc.chunk = choose.of(kBadSizes);
    if (choose.rarely(32)) desc.release = nullptr;
    if (choose.rarely(32)) desc.size = choose.byte() % sizeof desc;
    hooks.push_back(std::make_unique<Hook>(memory, backend));
    desc.user = hooks.back().get();
    dsopt_context *context = nullptr;
    if (counted("context_create", dsopt_context_create(&desc, choose.rarely(32) ? nullptr : &context)) == DSOPT_OK)
        contexts.push_back({test::Context(context), hooks.back().get()});
    else if (context != nullptr)
        finding("context_create failed and has written its result");
}
void Creation::create_comm() {
    if (comms.size() == 4) return;
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = choose.rarely(6) ? choose.below(7) : choose.flip() ? DSOPT_COMM_KIND_TABLE : DSOPT_COMM_KIND_SELF;
    echoes.push_back(std::make_unique<Echo>());
    Echo &echo = *echoes.back();
    echo.ranks = 1 + choose.below(4);
    echo.rank = choose.below(echo.ranks);
    dsopt_comm_table table = echo_table(echo);
    if (choose.rarely(4)) table.all_to_all = nullptr;
    if (choose.rarely(4)) table.all_gather = nullptr;
    if (choose.rarely(32)) table.all_reduce = nullptr;
    if (choose.rarely(16)) break_one({&table.memory, &table.reserved});
    if (backend == DSOPT_BACKEND_CUDA && table.memory == DSOPT_MEMORY_BACKEND) table.memory = 7; // memory of the host
    if (choose.rarely(32)) table.rank = table.ranks;
    if (choose.rarely(32)) table.size = choose.byte() % sizeof table;
    if (desc.kind == DSOPT_COMM_KIND_TABLE || choose.rarely(16)) desc.table = &table;
    const test::CommId id = test::new_id();
    if (desc.kind == DSOPT_COMM_KIND_LOCAL || choose.rarely(16)) {
        desc.id = id.data();
        desc.id_bytes = choose.rarely(8) ? choose.byte() : id.size();
        desc.ranks = choose.rarely(8) ? 2 : 1;
        desc.timeout_ms = 1;
    }
    if (choose.rarely(16)) break_one({&desc.rank, &desc.timeout_ms, &desc.flags, &desc.reserved});
    dsopt_comm *comm = nullptr;
    if (counted("comm_create", dsopt_comm_create(any_context(), choose.rarely(16) ? nullptr : &desc, &comm)) ==
        DSOPT_OK)
        comms.push_back(test::Comm(comm));
}
void Creation::create_scaler() {
    if (scalers.size() == 3) return;
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.profile = choose.rarely(8) ? choose.of(kIntegers) : choose.below(4);
    if (choose.flip()) desc.flags = 1 << choose.below(7);
    for (double *value : {&desc.init, &desc.factor, &desc.min, &desc.max})
        if (choose.rarely(4)) *value = number();
    for (int32_t *value : {&desc.window, &desc.hysteresis})
        if (choose.rarely(4)) *value = choose.of(kIntegers);
    dsopt_scaler *scaler = nullptr;
    if (counted("scaler_create", dsopt_scaler_create(any_context(), &desc, &scaler)) == DSOPT_OK)
        scalers.push_back(test::Scaler(scaler));
}
void Creation::create_optimizer() {
    if (optimizers.size() == 4 || contexts.empty()) return;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.compat = choose.rarely(4);
    for (int i = 0; i < 2; ++i)
        if (choose.rarely(3)) {
            const uint8_t byte = choose.byte();
            desc.flags |= byte >= 250 ? DSOPT_OPTIMIZER_SPLIT_MATRICES : 1 << byte % 10;
        }
    if (desc.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) {
        desc.flags |= DSOPT_OPTIMIZER_NO_MASTER;
        desc.seed = choose.byte();
    }
    desc.nonfinite = choose.below(3);
    const uint8_t masters = choose.byte();
    desc.masters = masters % 4 == 3   ? DSOPT_MASTERS_FLAT
                   : masters % 8 == 6 ? DSOPT_MASTERS_REMAINDER
                                      : DSOPT_MASTERS_PER_TENSOR;
    if (choose.rarely(3)) desc.max_norm = number();
    if (choose.rarely(4)) desc.max_value = number();
    if (choose.rarely(3) && !scalers.empty()) desc.scaler = scalers[index_of(scalers)].get();
    desc.data = any_comm();
    if (choose.rarely(4)) desc.model = any_comm();
    if (choose.rarely(4)) desc.node = any_comm();
    dsopt_comm *const experts[] = {any_comm(), any_comm()};
    if (choose.rarely(6)) desc.experts = experts, desc.expert_count = choose.below(3);
    if (choose.rarely(6)) desc.skip_budget = choose.below(3);
    if (choose.rarely(16)) break_one({&desc.compat, &desc.nonfinite, &desc.masters, &desc.skip_budget, &desc.flags});
    OptimizerRecord made;
    const OwnContext &context = contexts[index_of(contexts)];
    made.hook = context.hook;
    made.flags = desc.flags;
    made.compat = desc.compat;
    made.masters = desc.masters;
    dsopt_optimizer *optimizer = nullptr;
    if (counted("optimizer_create", dsopt_optimizer_create(context.handle.get(), choose.rarely(16) ? nullptr : &desc,
                                                           &optimizer)) != DSOPT_OK)
        return;
    made.handle.reset(optimizer);
    optimizers.push_back(std::move(made));
    add_group_to(optimizers.back());
}

std::vector<dsopt_param> Creation::new_params(const OptimizerRecord &o, bool onebit, bool has_formats, bool matrices,
                                              std::vector<dsopt_tensor> &tensors, int count) {
    std::vector<dsopt_param> params;
    for (int i = 0; i < count; ++i) {
        dsopt_param param{};
        int64_t numel = choose.of(kSizes);
        const bool is_cut = matrices && !choose.rarely(16);
        const Cut chosen = is_cut ? cut_of(choose) : Cut();
        if (is_cut) numel = chosen.numel;
        int32_t dtype = DSOPT_DTYPE_BF16;
        if (!(o.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING)) {
            const uint8_t byte = choose.byte();
            dtype = kDtypes[byte % std::size(kDtypes)];
            const bool is_refused = o.masters == DSOPT_MASTERS_REMAINDER && dtype == DSOPT_DTYPE_F16;
            if (is_refused && byte < 224) dtype = DSOPT_DTYPE_BF16;
        }
        param.tensor = tensor(numel, dtype);
        if (choose.rarely(12)) param.tensor.data = nullptr;
        if (choose.rarely(32)) make_invalid(param.tensor);
        param.name = choose.rarely(12) ? choose.of(kNames) : nullptr;
        dims_.push_back({param.tensor.numel, 1});
        if (choose.rarely(6)) param.dims = dims_.back().data(), param.ndim = choose.rarely(8) ? choose.byte() : 2;
        if (choose.rarely(8)) {
            const uint8_t byte = choose.byte();
            param.flags = 1 << byte % (onebit ? 3 : 2);
            if (has_formats && byte % 8 < 5) param.flags = DSOPT_PARAM_F32_MOMENTS;
        }
        if (is_cut) cut(param, chosen);
        if (choose.rarely(24)) param.offset = choose.of(kSizes);
        if (choose.rarely(16)) param.expert = choose.below(4);
        if (choose.rarely(64)) break_one({&param.ndim, &param.flags, &param.expert, &param.group});
        params.push_back(param);
        tensors.push_back(param.tensor);
    }
    return params;
}
void Creation::cut(dsopt_param &param, const Cut &cut) {
    cut.describe(param);
    std::copy(cut.dims.begin(), cut.dims.end(), dims_.back().begin());
    if (cut.ndim != 0) param.dims = dims_.back().data();
    if (choose.rarely(16)) (choose.flip() ? param.rows : param.cols) = choose.of(kBadSizes);
    if (choose.rarely(16)) (choose.flip() ? param.rows : param.cols) = choose.of(kSizes);
    if (choose.rarely(16)) param.flags ^= 1 << choose.below(5);
}
void Creation::add_group() {
    if (OptimizerRecord *const o = any_optimizer(); o != nullptr && o->params.size() < 12) add_group_to(*o);
}
void Creation::add_group_to(OptimizerRecord &o) {
    const bool is_arbitrary = choose.rarely(24);
    const uint8_t byte = choose.byte();
    const AlgorithmChoice chosen(byte);
    const int32_t algorithm = is_arbitrary ? kIntegers[byte % std::size(kIntegers)] : chosen.algorithm;
    const bool onebit = algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM;
    dsopt_group group;
    if (counted("group_init", dsopt_group_init(&group, choose.rarely(32) ? choose.byte() % sizeof group : sizeof group,
                                               algorithm)) != DSOPT_OK ||
        group.size != sizeof group) {
        group = {};
        group.size = sizeof group;
        group.algorithm = algorithm;
    }
    for (double *value : {&group.lr, &group.beta1, &group.beta2, &group.eps, &group.weight_decay, &group.max_norm,
                          &group.momentum, &group.trust_beta})
        if (choose.rarely(12)) *value = number();
    const bool matrices = algorithm == DSOPT_ALGORITHM_MUON;
    if (matrices) {
        choose_iterations(choose, group);
        if (choose.rarely(8)) break_one({&group.ns_steps, &group.ns_schedule, &group.ns_dtype, &group.adjust});
        for (double *value : {&group.ns_a, &group.ns_b, &group.ns_c})
            if (choose.rarely(16)) *value = number();
    }
    if (onebit) group.freeze_step = 1 + choose.below(4);
    if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
        for (int64_t *value : {&group.var_interval_steps, &group.local_interval_steps, &group.max_local_interval})
            *value = 1 + choose.below(3);
    if (choose.rarely(24)) group.freeze_step = choose.of(kBadSizes);
    if (choose.rarely(10)) {
        const uint8_t flag = choose.byte();
        group.flags ^= 1 << flag % 6;
        if (flag / 6 % 4 == 3) *(flag / 24 % 2 ? &group.exp_avg_format : &group.exp_avg_sq_format) = flag % 7 - 1;
    }
    if (!is_arbitrary && o.compat == DSOPT_COMPAT_NONE && o.masters != DSOPT_MASTERS_FLAT)
        set_formats(group, chosen.formats);
    const bool has_formats = !Formats{group.exp_avg_format, group.exp_avg_sq_format}.are_f32();
    std::vector<dsopt_tensor> tensors;
    const std::vector<dsopt_param> params = new_params(o, onebit, has_formats, matrices, tensors, choose.below(5));
    watch(
        o, "add_group",
        [&] {
            return counted("add_group",
                           dsopt_optimizer_add_group(o.handle.get(), &group, params.data(), count_of(params)));
        },
        [&] {
            added(o, tensors, true);
            o.has_formats |= has_formats;
            o.has_matrices |= matrices;
        });
}
void Creation::add_params() {
    OptimizerRecord *const o = any_optimizer();
    if (o == nullptr || o->params.size() > 12) return;
    std::vector<dsopt_tensor> tensors;
    std::vector<dsopt_param> params = new_params(*o, false, o->has_formats, o->has_matrices, tensors, choose.below(3));
    for (dsopt_param &param : params) param.group = choose.below(3);
    watch(
        *o, "add_params",
        [&] {
            return counted("add_params", dsopt_optimizer_add_params(o->handle.get(), params.data(), count_of(params)));
        },
        [&] { added(*o, tensors, false); });
}

} // namespace fuzz
