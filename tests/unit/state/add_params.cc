// SPDX-License-Identifier: Apache-2.0
// dsopt_optimizer_add_params: parameters of alternating groups give the bits of contiguous groups in every function of
// an optimizer. Also long lists, refusals in compat mode, generations of state tensors, parameters added after steps.
#include "support/onebit.h"

using namespace test;

namespace state_add_params_tests {

constexpr int kSteps = 5;

/// A parameter of one of two groups.
struct Layer {
    size_t numel;
    int32_t group;
    int32_t dtype = DSOPT_DTYPE_F32;
    std::string name() const { return "n" + std::to_string(numel); }
};
/// A model whose parameters belong to two alternating groups.
const std::vector<Layer> kModel{{4097, 0}, {33, 1}, {700, 0}, {0, 1}, {5, 1}, {8192, 0}, {1, 0}, {64, 1}};

std::vector<Layer> with_dtype(int32_t dtype) {
    std::vector<Layer> model = kModel;
    for (Layer &layer : model) layer.dtype = dtype;
    return model;
}
std::vector<Layer> sorted_by_group(std::vector<Layer> model) {
    std::stable_sort(model.begin(), model.end(), [](const Layer &a, const Layer &b) { return a.group < b.group; });
    return model;
}

struct Groups {
    dsopt_group first, second;
};

/// An optimizer of two groups, and their parameters in a given order.
class Interleaved {
public:
    Interleaved(const Context &ctx, const dsopt_optimizer_desc &desc, const Groups &groups,
                const std::vector<Layer> &model) :
        trainer(ctx, desc),
        layers(model) {
        must(trainer.add_group(groups.first, {}));
        must(trainer.add_group(groups.second, {}));
        must(add(model));
    }
    dsopt_status add(const std::vector<Layer> &model) {
        std::vector<dsopt_param> list;
        std::vector<std::string> names;
        for (const Layer &layer : model) names.push_back(layer.name());
        std::vector<Array> &weights = trainer.weights();
        for (size_t i = 0; i < model.size(); ++i) {
            Random random{uint64_t(model[i].numel + 1)};
            weights.emplace_back(model[i].dtype, random.floats(model[i].numel));
            dsopt_param param{};
            param.tensor = weights.back().tensor();
            param.name = names[i].c_str();
            param.group = model[i].group;
            list.push_back(param);
        }
        return dsopt_optimizer_add_params(trainer.opt(), list.data(), int64_t(list.size()));
    }
    dsopt_status step(int call, const std::function<void(dsopt_step &)> &change = {}) {
        grads_.clear();
        for (const Layer &layer : layers) {
            Random random{uint64_t(layer.numel * 100 + size_t(call))};
            grads_.emplace_back(layer.dtype, random.floats(layer.numel, -3, 2));
        }
        // The first parameter is the same one with alternating and with contiguous groups.
        if (call == 3) grads_[0] = Array::absent(layers[0].numel, layers[0].dtype);
        return trainer.step(grads_, change);
    }
    /// Returns weights, state, step counts and trust ratios of each parameter, by its name.
    std::map<std::string, std::string> by_name() {
        std::map<std::string, std::string> all;
        for (size_t i = 0; i < layers.size(); ++i) all[layers[i].name()] = trainer.weight(i).text();
        const std::vector<dsopt_state_info> list = trainer.state();
        for (size_t i = 0; i < list.size(); ++i) {
            std::string bytes(size_t(list[i].tensor.numel) * 4, 0);
            must(dsopt_optimizer_export(trainer.opt(), int64_t(i), bytes.data(), bytes.size()));
            const std::string name = list[i].name;
            if (list[i].param >= 0)
                all[layers[size_t(list[i].param)].name() + "." + name] = bytes;
            else if (name == "step" || name == "trust_ratio")
                for (size_t p = 0; p < layers.size(); ++p) all[layers[p].name() + "." + name] = bytes.substr(p * 4, 4);
        }
        return all;
    }
    Trainer trainer;
    std::vector<Layer> layers;

private:
    std::vector<Array> grads_;
};

testing::AssertionResult same(const std::map<std::string, std::string> &a,
                              const std::map<std::string, std::string> &b) {
    return test::same(Snapshot(a), Snapshot(b));
}

/// Expects the same bits with alternating and with contiguous groups. Norms add tensors in the order of the list, so
/// this holds only without clipping by the norm of all groups.
void expect_same_bits(const dsopt_optimizer_desc &desc, const Groups &groups, const std::vector<Layer> &model,
                      const std::function<void(dsopt_step &)> &change = {}) {
    const Context ctx = make_context(2);
    Interleaved alternating(ctx, desc, groups, model), contiguous(ctx, desc, groups, sorted_by_group(model));
    for (int call = 1; call <= kSteps; ++call) {
        must(alternating.step(call, change));
        must(contiguous.step(call, change));
        ASSERT_TRUE(same(alternating.by_name(), contiguous.by_name())) << "step " << call;
        EXPECT_EQ(alternating.trainer.report().reasons, 0);
    }
}

Groups groups_of(int32_t first, int32_t second) {
    Groups groups{group_of(first, 1e-2, 0.1), group_of(second, 3e-3, 0)};
    groups.second.beta1 = 0.8;
    return groups;
}

TEST(AlternatingGroups, MatchContiguousGroupsBitwise) {
    for (const int32_t first : kStandardRules)
        for (const int32_t second : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB})
            for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16})
                expect_same_bits(optimizer_desc(), groups_of(first, second), with_dtype(dtype));
}

TEST(AlternatingGroups, AreClippedByTheirOwnNorms) {
    Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAM);
    groups.first.max_norm = 0.5;
    groups.second.max_norm = 2;
    expect_same_bits(optimizer_desc(), groups, kModel);
}

TEST(AlternatingGroups, UseTheirOwnHyperParameters) {
    const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB);
    const float lr[] = {2e-3f, 5e-2f};
    expect_same_bits(optimizer_desc(), groups, kModel, [&](dsopt_step &step) { step.lr = on_device(lr); });
    std::vector<float> rows(2 * DSOPT_HYPER_FLOATS, kNaN);
    rows[DSOPT_HYPER_WEIGHT_DECAY] = 0.5f;
    rows[DSOPT_HYPER_FLOATS + DSOPT_HYPER_BETA1] = 0.5f;
    expect_same_bits(optimizer_desc(), groups, kModel, [&](dsopt_step &step) { step.hyper = on_device(rows); });
    const Context ctx = make_context(1);
    Interleaved alternating(ctx, optimizer_desc(), groups, kModel),
        contiguous(ctx, optimizer_desc(), groups, sorted_by_group(kModel));
    for (Interleaved *optimizer : {&alternating, &contiguous}) {
        must(optimizer->step(1));
        must(dsopt_optimizer_set(optimizer->trainer.opt(), 1, DSOPT_KEY_LR, 0));
        must(optimizer->step(2));
        EXPECT_EQ(optimizer->trainer.get(DSOPT_KEY_LR), 1e-2);
    }
    EXPECT_TRUE(same(alternating.by_name(), contiguous.by_name()));
}

TEST(AlternatingGroups, HaveContiguousFlatMasters) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.masters = DSOPT_MASTERS_FLAT;
    const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB);
    expect_same_bits(desc, groups, with_dtype(DSOPT_DTYPE_F16));
    const Context ctx = make_context(1);
    Interleaved alternating(ctx, desc, groups, with_dtype(DSOPT_DTYPE_BF16));
    must(alternating.step(1));
    const char *next[2] = {};
    for (const dsopt_state_info &info : alternating.trainer.state()) {
        if (std::strcmp(info.name, "master") != 0) continue;
        const int32_t group = alternating.layers[size_t(info.param)].group;
        const auto *const data = static_cast<const char *>(info.tensor.data);
        if (next[group] != nullptr) { EXPECT_EQ(data, next[group]) << alternating.layers[size_t(info.param)].name(); }
        next[group] = data + info.tensor.numel * 4;
    }
}

TEST(AlternatingGroups, ExchangeOnlyTheirOwnParameters) {
    // 1-bit Adam and a group that is never compressed. Signs and scales are sent in the order of the list. There
    // is one scale per tensor, so both orders have the same scales at different indices.
    const CommId ids[2] = {new_id(), new_id()};
    std::map<std::string, std::string> results[2][2];
    for (const int order : {0, 1}) // alternating, contiguous
        run_ranks(2, [&](int rank) {
            const Context ctx = make_context(1);
            const Comm comm = local_comm(ctx, ids[order], rank, 2);
            Groups groups{group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2)};
            groups.second.flags = DSOPT_GROUP_NON_FREEZE;
            Interleaved optimizer(ctx, desc_with(comm), groups, order == 0 ? kModel : sorted_by_group(kModel));
            for (int call = 1; call <= kSteps + 2; ++call) must(optimizer.step(call));
            results[order][rank] = optimizer.by_name();
        });
    for (const int order : {0, 1})
        for (const auto &[name, bytes] : results[order][0])
            if (name.find("error") == std::string::npos) {
                EXPECT_EQ(bytes == results[order][1].at(name), true) << name << " differs between ranks";
            }
    const std::vector<std::string> whole{"n33", "n64", "n5", "n33.exp_avg", "n64.exp_avg_sq"};
    for (const std::string &name : whole) // the group that is not compressed has the same bits
        EXPECT_TRUE(results[0][0].at(name) == results[1][0].at(name)) << name;
}

TEST(AlternatingGroups, ResumeFromACheckpointWithTheSameBits) {
    const Context ctx = make_context(1);
    for (const int32_t second : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, second);
        const std::vector<Layer> model = with_dtype(DSOPT_DTYPE_F16);
        Interleaved uninterrupted(ctx, optimizer_desc(), groups, model);
        MemoryFile file;
        for (int call = 1; call <= 2; ++call) must(uninterrupted.step(call));
        ASSERT_OK(file.save(uninterrupted.trainer, DSOPT_IO_PARAMS));
        for (int call = 3; call <= kSteps; ++call) must(uninterrupted.step(call));
        // State is stored by parameter name, so an optimizer with another order can load the file.
        for (const std::vector<Layer> &layers : {model, sorted_by_group(model)}) {
            Interleaved resumed(ctx, optimizer_desc(), groups, layers);
            ASSERT_OK(file.load(resumed.trainer, DSOPT_IO_PARAMS));
            for (int call = 3; call <= kSteps; ++call) {
                if (call == 3 && layers[1].group == 0) continue; // the gradient of another tensor is absent
                must(resumed.step(call));
            }
            if (layers[1].group != 0) { EXPECT_TRUE(same(uninterrupted.by_name(), resumed.by_name())); }
        }
        Interleaved contiguous(ctx, optimizer_desc(), groups, sorted_by_group(model));
        must(contiguous.step(1));
        MemoryFile other;
        ASSERT_OK(other.save(contiguous.trainer, DSOPT_IO_PARAMS));
        Interleaved alternating(ctx, optimizer_desc(), groups, model);
        ASSERT_OK(other.load(alternating.trainer, DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(contiguous.by_name(), alternating.by_name()));
    }
}

TEST(AlternatingGroups, RefuseACheckpointOfOtherGroups) {
    const Context ctx = make_context(1);
    const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAMW);
    Interleaved saved(ctx, optimizer_desc(), groups, kModel);
    must(saved.step(1));
    MemoryFile file;
    ASSERT_OK(file.save(saved.trainer));
    std::vector<Layer> other = kModel;
    std::swap(other[0].group, other[1].group); // the groups keep their sizes
    Interleaved loads(ctx, optimizer_desc(), groups, other);
    must(loads.step(1));
    const auto before = loads.by_name();
    EXPECT_TRUE(refused(file.load(loads.trainer), DSOPT_ERR_MISMATCH, "n4097"));
    // The list of groups is corrupted without a change of its length, so that offsets stay valid.
    const size_t offset = file.data.find("0,1,0,1,1,0,0,1,");
    ASSERT_NE(offset, std::string::npos);
    for (const char *bad : {"0,1,0,1,1,0,0,0,", "0,1,0,1,1,0,0,2,", "0,1,0,1,1,0,0,1;", "0,1,0,1,1,0,0,,,",
                            "0,1,0,1,1,0,   ,", "0,1,0,1,1,0,-1,1", "1,0,0,1,1,0,0,1,"}) {
        MemoryFile corrupted = file;
        corrupted.data.replace(offset, std::strlen(bad), bad);
        const dsopt_status status = corrupted.load(loads.trainer);
        EXPECT_TRUE(status == DSOPT_ERR_FORMAT || status == DSOPT_ERR_MISMATCH) << bad << dsopt_status_name(status);
        EXPECT_TRUE(same(before, loads.by_name()));
    }
}

TEST(AddMoreParams, KeepsStateOfOthersBetweenSteps) {
    const Context ctx = make_context(1);
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}) {
        const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB);
        const std::vector<Layer> model = with_dtype(dtype), begin(model.begin(), model.begin() + 4),
                                 end(model.begin() + 4, model.end());
        Interleaved grows(ctx, optimizer_desc(), groups, begin), ends(ctx, optimizer_desc(), groups, end);
        for (int call = 1; call <= 2; ++call) must(grows.step(call));
        const auto before = grows.by_name();
        ASSERT_OK(grows.add(end));
        grows.layers = model;
        const auto after = grows.by_name();
        for (const auto &[name, bytes] : before) EXPECT_TRUE(after.at(name) == bytes) << name;
        // Parameters that are added late start as in a new optimizer; the others continue.
        Interleaved alone(ctx, optimizer_desc(), groups, begin);
        for (int call = 1; call <= kSteps; ++call) must(alone.step(call));
        for (int call = 3; call <= kSteps; ++call) {
            must(grows.step(call));
            if (call == 3) // the first gradient of Interleaved::step(3) is absent
                must(ends.trainer.step([&] {
                    std::vector<Array> grads;
                    for (const Layer &layer : end) {
                        Random random{uint64_t(layer.numel * 100 + 3)};
                        grads.emplace_back(layer.dtype, random.floats(layer.numel, -3, 2));
                    }
                    return grads;
                }()));
            else
                must(ends.step(call));
        }
        const auto all = grows.by_name();
        for (Interleaved *part : {&alone, &ends})
            for (const auto &[name, bytes] : part->by_name()) EXPECT_TRUE(all.at(name) == bytes) << name;
    }
}

LABEL(long_emulated);
TEST(AddMoreParams, Accepts20000InOneCall) {
    const Context ctx = make_context(1);
    Interleaved optimizer(ctx, optimizer_desc(), groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAM), {});
    constexpr int64_t count = 20000;
    const Shared<float> memory(count), gradients(count, 1.0f);
    float *const weight = memory.data(), *const gradient = gradients.data();
    std::vector<dsopt_param> params(count);
    std::vector<dsopt_tensor> grads(count);
    for (int64_t i = 0; i < count; ++i) {
        params[size_t(i)].tensor = {weight + i, 1, DSOPT_DTYPE_F32, 0};
        params[size_t(i)].group = int32_t(i % 2);
        grads[size_t(i)] = {gradient + i, 1, DSOPT_DTYPE_F32, 0};
    }
    ASSERT_OK(dsopt_optimizer_add_params(optimizer.trainer.opt(), params.data(), count));
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = count;
    ASSERT_OK(dsopt_optimizer_step(optimizer.trainer.opt(), &step));
    EXPECT_NE(memory[0], 0);
    EXPECT_EQ(memory.back(), memory[1]);
    EXPECT_NE(memory.back(), memory[0]);
}

// --------------------------------------------------------------------------------------------------------- compat mode
TEST(CompatMode, RefusesAlternatingAndAcceptsContiguousGroups) {
    const Context ctx = make_context(1);
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}) {
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        const Groups groups = groups_of(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAMW);
        const std::vector<Layer> model = with_dtype(dtype);
        Interleaved empty(ctx, desc, groups, {});
        EXPECT_TRUE(refused(empty.add(model), DSOPT_ERR_UNSUPPORTED, "'n700'"));
        empty.trainer.weights().clear();
        int64_t count = 7;
        must(dsopt_optimizer_count(empty.trainer.opt(), nullptr, &count));
        EXPECT_EQ(count, 0);
        const std::vector<Layer> order = sorted_by_group(model);
        const std::vector<Layer> begin(order.begin(), order.begin() + 2), middle(order.begin() + 2, order.end());
        ASSERT_OK(empty.add(begin)); // group 0 continues in the next call
        ASSERT_OK(empty.add(middle));
        empty.layers = order;
        EXPECT_TRUE(refused(empty.add({{2, 0, dtype}}), DSOPT_ERR_UNSUPPORTED, "'n2'"));
        empty.trainer.weights().pop_back();
        // The same groups, added with their parameters.
        Trainer reference(ctx, desc);
        for (const int32_t group : {0, 1}) {
            std::vector<Param> params;
            for (const Layer &layer : order)
                if (layer.group == group) {
                    Random random{uint64_t(layer.numel + 1)};
                    params.push_back({Array(dtype, random.floats(layer.numel)), layer.name()});
                }
            must(reference.add_group(group == 0 ? groups.first : groups.second, std::move(params)));
        }
        for (int call = 1; call <= kSteps; ++call) {
            std::vector<Array> grads;
            for (const Layer &layer : order) {
                Random random{uint64_t(layer.numel * 100 + size_t(call))};
                grads.emplace_back(dtype, random.floats(layer.numel, -3, 2));
            }
            must(reference.step(grads));
            must(empty.trainer.step(grads));
        }
        EXPECT_TRUE(test::same(reference.snapshot(), empty.trainer.snapshot()));
    }
}

LABEL(long_emulated);
TEST(StateGeneration, ChangesOnlyIfTheTensorMoves) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_LAMB);
    const Shared<float> weights(300, 1.0f), grads(300, 1.0f);
    std::vector<dsopt_tensor> list;
    std::map<std::string, std::map<int64_t, const void *>> generations;
    for (size_t i = 0; i < weights.size(); ++i) {
        const dsopt_param param = param_of({&weights[i], 1, DSOPT_DTYPE_F32, 0});
        must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
        EXPECT_EQ(state_info(opt.get(), state_index(opt.get(), int64_t(i), "exp_avg")).generation, 0);
        list.push_back({&grads[i], 1, DSOPT_DTYPE_F32, 0});
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        must(dsopt_optimizer_step(opt.get(), &step));
        for (const char *name : {"step", "trust_ratio"}) {
            const dsopt_state_info info = state_info(opt.get(), state_index(opt.get(), -1, name));
            EXPECT_GT(info.generation, 0);
            const auto [entry, is_new] = generations[name].emplace(info.generation, info.tensor.data);
            EXPECT_EQ(entry->second, info.tensor.data) << name << " of " << i;
        }
        // The memory of the first generation keeps its contents after the tensor has moved.
        const std::vector<int32_t> now = steps(opt.get());
        for (size_t k = 0; k <= i; ++k) ASSERT_EQ(now[k], int32_t(i + 1 - k));
        EXPECT_EQ(on_host(static_cast<const int32_t *>(generations["step"].begin()->second)), 1);
    }
    for (const auto &[name, all] : generations) {
        EXPECT_GT(all.size(), 3u) << name;
        EXPECT_LT(all.size(), 25u) << name << " generations in 300 additions";
    }
}

TEST(StateGeneration, ChangesIfOtherMemoryIsBound) {
    Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW));
    must(trainer.step(trainer.arguments()));
    std::vector<int64_t> before;
    std::vector<dsopt_tensor> list;
    for (const dsopt_state_info &info : state_of(trainer.opt())) {
        before.push_back(info.generation);
        list.push_back(info.tensor);
    }
    must(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    const Shared<float> other(5, 0.0f);
    const std::vector<dsopt_state_info> same_memory = state_of(trainer.opt());
    for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(same_memory[i].generation, before[i]) << same_memory[i].name;
    list[0].data = other.data();
    must(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    const std::vector<dsopt_state_info> bound = state_of(trainer.opt());
    for (size_t i = 0; i < bound.size(); ++i) EXPECT_EQ(bound[i].generation == before[i], i != 0) << bound[i].name;
}

TEST(AddMoreParams, CopiesBoundStateOnlyIfItSucceeds) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_LAMB);
    const Shared<float> weights(8, 1.0f), ones(8, 1.0f), ratios{0.5f};
    const Shared<int32_t> counts{7};
    const auto add = [&](int64_t begin) {
        const dsopt_param param = param_of({&weights[size_t(begin)], 4, DSOPT_DTYPE_F32, 0});
        return dsopt_optimizer_add_group(opt.get(), &group, &param, 1);
    };
    must(add(0));
    std::vector<dsopt_tensor> list;
    for (const dsopt_state_info &info : state_of(opt.get())) list.push_back(info.tensor);
    (list.end() - 2)->data = ratios.data();
    list.back().data = counts.data();
    must(dsopt_optimizer_bind(opt.get(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    const int64_t generation = state_of(opt.get()).back().generation;
    EXPECT_TRUE(refused(add(2), DSOPT_ERR_OVERLAP, "'p1' share memory"));
    EXPECT_EQ(state_of(opt.get()).back().tensor.data, counts.data());
    EXPECT_EQ(state_of(opt.get()).back().generation, generation);
    ASSERT_OK(add(4));
    counts[0] = -1; // the optimizer no longer uses the caller's memory
    ratios[0] = -1;
    const std::vector<dsopt_state_info> after = state_of(opt.get());
    const dsopt_state_info &step = after.back(), &ratio = *(after.end() - 2);
    EXPECT_GT(step.generation, generation);
    ASSERT_EQ(step.tensor.numel, 2);
    EXPECT_EQ(steps(opt.get()), (std::vector<int32_t>{7, 0}));
    EXPECT_EQ(on_host(static_cast<const float *>(ratio.tensor.data)), 0.5f);
    const dsopt_tensor grads[] = {{&ones[0], 4, DSOPT_DTYPE_F32, 0}, {&ones[4], 4, DSOPT_DTYPE_F32, 0}};
    DSOPT_NEW(dsopt_step, call);
    call.grads = grads;
    call.count = 2;
    ASSERT_OK(dsopt_optimizer_step(opt.get(), &call));
    EXPECT_EQ(state_of(opt.get()).back().tensor.data, step.tensor.data);
    EXPECT_EQ(steps(opt.get()), (std::vector<int32_t>{8, 1}));
    EXPECT_EQ(counts[0], -1);
}

TEST(AddMoreParams, FindsOverlapsWithStateAfterTwoAdditions) {
    Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW));
    must(trainer.step(trainer.arguments()));
    for (const char *name : {"second", "third"})
        must(trainer.add_group(make_group(DSOPT_ALGORITHM_ADAMW), {{Array(DSOPT_DTYPE_F32, 3, 1), name}}));
    const dsopt_state_info step = trainer.state().back();
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    const dsopt_param param = param_of({step.tensor.data, 1, DSOPT_DTYPE_F32, 0});
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), DSOPT_ERR_OVERLAP,
                        "step 'the optimizer' share memory"));
}

} // namespace state_add_params_tests
