// SPDX-License-Identifier: Apache-2.0
// Bits do not depend on the number of threads, the parallel_for hook, the instruction set, the chunk size, the order of
// the list, how tensors are split, cache sizes, or the floating-point mode of the caller.
#include "support/harness.h"
#include <cfenv>
#include <numeric>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace test;

namespace bits_same_bits_tests {

/// Sets DSOPT_CACHES during its lifetime: the sizes of a core's private cache and of the last-level cache.
struct Caches {
    explicit Caches(const char *sizes) { setenv("DSOPT_CACHES", sizes, 1); }
    ~Caches() { unsetenv("DSOPT_CACHES"); }
};
constexpr char kNoCaches[] = "0,0", kLargeCaches[] = "1000000000000,1000000000000";

/// Shapes for one group of each algorithm: every dtype, sizes around leaf and chunk, enough work for eight threads.
std::vector<Shape> mixed_shapes() {
    std::vector<Shape> shapes;
    for (size_t i = 0; i < std::size(kStandardRules); ++i) {
        shapes.push_back({10011, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32});
        shapes.push_back({0, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32});
        shapes.push_back({4097, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16, 2});
        shapes.push_back({1, DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, 4});
        shapes.push_back({8191, DSOPT_DTYPE_F16, DSOPT_DTYPE_F32, 4});
        shapes.push_back({12300, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16});
    }
    return shapes;
}

/// Returns the bits of parameters, state and norms after two steps.
std::string train_mixed(const dsopt_context_desc &desc, double max_norm) {
    Trainer trainer(mixed_shapes(), optimizer_desc(max_norm, DSOPT_OPTIMIZER_REPORT_NORMS), desc);
    for (const int32_t algorithm : kStandardRules) trainer.add(make_group(algorithm), 6);
    std::string all;
    for (uint64_t t = 1; t <= 2; ++t) {
        trainer.train(t);
        const dsopt_report report = report_of(trainer.opt());
        for (const double value : {report.grad_norm, report.weight_norm, report.update_norm, report.divisor})
            all.append(reinterpret_cast<const char *>(&value), sizeof value);
    }
    EXPECT_TRUE(trainer.model.intact());
    return all + trainer.text();
}

const std::string &reference(double max_norm) {
    static std::string texts[2];
    std::string &text = texts[max_norm > 0];
    if (text.empty()) {
        const Isa isa("generic");
        text = train_mixed(context_desc(1), max_norm);
    }
    return text;
}

using Setting = std::tuple<int32_t, int, const char *, int64_t>; // threads, hook, instruction set, chunk size
class StepBits : public testing::TestWithParam<Setting> {};

LABEL(long_emulated);
TEST_P(StepBits, DoNotDependOnThreadsHookIsaAndChunk) {
    const auto [threads, hook, isa_name, chunk] = GetParam();
    const Isa isa(isa_name);
    Workers workers;
    dsopt_context_desc desc = context_desc(threads);
    desc.chunk = chunk;
    if (hook != 0) {
        desc.parallel_for = hook == 1 ? Workers::run : run_reversed;
        desc.user = &workers;
    }
    EXPECT_TRUE(same(train_mixed(desc, 0), reference(0)));
    EXPECT_TRUE(same(train_mixed(desc, 0.5), reference(0.5)));
}

INSTANTIATE_TEST_SUITE_P(Settings, StepBits,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Values(0, 1, 2),
                                          testing::ValuesIn(kIsas), testing::Values(4096, 8192, 65536)));

LABEL(cpu); // parallel_for hooks
TEST(StepParallelFor, ReplacesTheHookOfTheContext) {
    const std::vector<Shape> shapes = shapes_of({100000});
    const Trainer plain(shapes, make_group(DSOPT_ALGORITHM_LAMB), optimizer_desc(0.5), context_desc(4));
    dsopt_context_desc desc = context_desc(4);
    desc.parallel_for = [](void *, int64_t, Body, void *) { FAIL() << "the hook of the context was called"; };
    const Trainer hooked(shapes, make_group(DSOPT_ALGORITHM_LAMB), optimizer_desc(0.5), desc);
    struct Count {
        int64_t calls = 0, parts = 0;
    } count;
    for (uint64_t t = 1; t <= 3; ++t) {
        plain.train(t);
        hooked.model.make_gradients(t);
        dsopt_step step = hooked.arguments();
        step.parallel_user = &count;
        step.parallel_for = [](void *user, int64_t n, Body body, void *arg) {
            auto *seen = static_cast<Count *>(user);
            ++seen->calls;
            seen->parts = std::max(seen->parts, n);
            run_reversed(nullptr, n, body, arg);
        };
        must(hooked.step(step));
    }
    EXPECT_TRUE(same(plain.text(), hooked.text()));
    EXPECT_GT(count.calls, 0);
    EXPECT_EQ(count.parts, 4);
}

TEST(Determinism, GivesOneResultIn100Runs) {
    std::string first;
    for (int run = 0; run < 100; ++run) {
        const Trainer trainer(shapes_of({40000, 5, 4097}), make_group(DSOPT_ALGORITHM_LAMB), optimizer_desc(0.5),
                              context_desc(1 + run % 8));
        trainer.train(1, 2);
        const std::string text = trainer.text();
        if (first.empty()) first = text;
        ASSERT_TRUE(same(first, text)) << run;
    }
}

// ------------------------------------------------------------------------------------ mixed precision, norms, clipping
/// A parallel_for hook that runs a loop backwards on two threads. Counts its calls in `calls`.
void run_on_two_threads(void *calls, int64_t n, void (*body)(void *, int64_t), void *arg) {
    ++*static_cast<int *>(calls);
    std::thread other([&] {
        for (int64_t i = n - 1; i >= 0; i -= 2) body(arg, i);
    });
    for (int64_t i = n - 2; i >= 0; i -= 2) body(arg, i);
    other.join();
}

struct Execution {
    int threads;
    const char *isa;
    int64_t chunk;
    bool hook;
};

/// Returns state, parameters and reports after the steps.
Snapshot run_steps(const Execution &execution, dsopt_optimizer_desc desc, const std::vector<Array> &weights,
                   const std::vector<std::vector<Array>> &grads) {
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.threads = execution.threads;
    context_desc.chunk = execution.chunk;
    const Context ctx = [&] {
        const Isa isa(execution.isa);
        return make_context(context_desc);
    }();
    const Scaler scaler = make_scaler(ctx, 64, 2);
    desc.scaler = scaler.get();
    desc.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
    Trainer trainer(ctx, desc);
    const int32_t algorithms[] = {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAMW,
                                  DSOPT_ALGORITHM_ADAM_LEGACY};
    for (size_t g = 0; g < 4; ++g) {
        dsopt_group group = group_of(algorithms[g]);
        group.max_norm = g % 2 ? 1.5 : 0;
        std::vector<Param> params;
        for (size_t i = g; i < weights.size(); i += 4) params.push_back({weights[i]});
        must(trainer.add_group(group, std::move(params)));
    }
    std::string reports;
    int calls = 0;
    for (const std::vector<Array> &step : grads) {
        std::vector<Array> ordered;
        for (size_t g = 0; g < 4; ++g)
            for (size_t i = g; i < step.size(); i += 4) ordered.push_back(step[i]);
        must(trainer.step(ordered, [&](dsopt_step &s) {
            s.parallel_for = execution.hook ? run_on_two_threads : nullptr;
            s.parallel_user = execution.hook ? &calls : nullptr;
        }));
        const dsopt_report report = trainer.report();
        for (const double value : {report.grad_norm, report.dense_norm, report.weight_norm, report.update_norm,
                                   report.divisor, report.loss_scale})
            reports.append(reinterpret_cast<const char *>(&value), sizeof value);
    }
    EXPECT_EQ(calls > 0, execution.hook && execution.threads > 1);
    Snapshot all = trainer.snapshot();
    all["reports"] = reports;
    return all;
}

class MixedPrecisionBits : public testing::TestWithParam<int> {
}; // standard mode, compat mode with flat masters, compat mode with a master per tensor
INSTANTIATE_TEST_SUITE_P(, MixedPrecisionBits, testing::Values(0, 1, 2), [](const auto &info) {
    return std::string(std::array{"Standard", "CompatFlat", "CompatPerTensor"}[size_t(info.param)]);
});

TEST_P(MixedPrecisionBits, DoNotDependOnThreadsIsaChunkAndHook) {
    Random random(1);
    const int32_t dtypes[] = {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32};
    const std::vector<size_t> sizes = {1, 20481, 0, 4095, 4096, 4097, 33, 30000, 1025, 8192, 12289, 16385};
    std::vector<Array> weights;
    for (const size_t size : sizes) weights.emplace_back(dtypes[weights.size() % 3], random.floats(size));
    std::vector<std::vector<Array>> grads(4);
    for (size_t step = 0; step < grads.size(); ++step)
        for (const size_t size : sizes)
            grads[step].emplace_back(dtypes[(grads[step].size() + step) % 3], random.floats(size, -90, 90));
    grads[2][7].set(29999, kInf); // step 3 is skipped
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.compat = GetParam() == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
    desc.masters = GetParam() == 1 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
    desc.max_norm = 2;
    desc.max_value = 0.1;
    const Snapshot wanted = run_steps({1, "generic", 4096, false}, desc, weights, grads);
    for (const char *isa : kIsas)
        for (const int threads : {1, 2, 3, 5, 8})
            EXPECT_TRUE(same(wanted, run_steps({threads, isa, 4096, false}, desc, weights, grads)))
                << isa << ", " << threads << " threads";
    EXPECT_TRUE(same(wanted, run_steps({3, "avx2", 16384, false}, desc, weights, grads))) << "larger chunks";
    EXPECT_TRUE(same(wanted, run_steps({5, "avx2", 0, true}, desc, weights, grads))) << "parallel_for hook";
}

// -------------------------------------------------------------------------------------------------------------- caches
// Lists larger than a core's private cache are prefetched, across the ends of tensors. Lists larger than the last-level
// cache are written with non-temporal stores.
LABEL(one_of_many);
LABEL(long_emulated);
TEST(Prefetch, ChangesNoBit) {
    for (const char *sizes : {kNoCaches, "0,1000000000000", "1000000000000,0", kLargeCaches})
        for (const char *name : kIsas)
            for (const int32_t threads : {1, 2, 5}) {
                const Caches caches(sizes);
                const Isa isa(name);
                EXPECT_TRUE(same(train_mixed(context_desc(threads), 0.5), reference(0.5)))
                    << sizes << ' ' << name << ' ' << threads;
            }
}

// Steps the same tensors in one list larger than the caches, and each in a separate list.
LABEL(one_of_many);
LABEL(long_emulated);
TEST(NonTemporalStores, ChangeNoBit) {
    std::vector<Shape> shapes;
    for (int i = 0; i < 4; ++i)
        shapes.push_back({700003, i % 2 ? DSOPT_DTYPE_F16 : DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16, size_t(2 + 10 * i), i});
    for (const char *name : {"generic", "avx512", "avx512_bf16"}) {
        const Isa isa(name);
        const Trainer whole = [&] {
            const Caches caches(kNoCaches);
            return Trainer(shapes, make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), context_desc(2));
        }();
        const Caches caches(kLargeCaches);
        std::vector<Array> outs;
        for (const Shape &shape : shapes) outs.emplace_back(DSOPT_DTYPE_F16, size_t(shape.numel), 0.0f, shape.offset);
        const std::vector<dsopt_tensor> out = list_of(outs);
        dsopt_step step = whole.arguments();
        step.out = out.data();
        for (int t = 0; t < 2; ++t) must(whole.step(step));
        for (size_t i = 0; i < shapes.size(); ++i) {
            const Trainer alone({shapes[i]}, make_group(DSOPT_ALGORITHM_ADAMW));
            const Array alone_out(DSOPT_DTYPE_F16, size_t(shapes[i].numel), 0);
            const dsopt_tensor list = alone_out.tensor();
            step = alone.arguments();
            step.out = &list;
            for (int t = 0; t < 2; ++t) must(alone.step(step));
            ASSERT_TRUE(same(whole.model.params[i].text(), alone.model.text())) << name << " " << i;
            ASSERT_TRUE(same(outs[i].text(), alone_out.text())) << name << " " << i;
            ASSERT_TRUE(outs[i].intact());
        }
        ASSERT_TRUE(whole.model.intact());
    }
}

// --------------------------------------------------------------------------------------------------- types and outputs
/// Dtypes and flags of a step.
struct Form {
    int32_t weight, grad, out; // dtypes; out -1: no output
    uint32_t optimizer_flags, step_flags;
};
std::vector<Form> forms() {
    std::vector<Form> forms;
    const auto add = [&](int32_t weight, int32_t grad, uint32_t flags) {
        const bool masters = weight != DSOPT_DTYPE_F32 && !(flags & DSOPT_OPTIMIZER_NO_MASTER);
        forms.push_back({weight, grad, -1, flags, 0});
        for (const int32_t out : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16})
            for (const uint32_t step_flags :
                 {0, int(DSOPT_STEP_DELTA), int(DSOPT_STEP_OUT_ONLY), DSOPT_STEP_DELTA | DSOPT_STEP_OUT_ONLY})
                if (!masters || !(step_flags & DSOPT_STEP_DELTA))
                    forms.push_back({weight, grad, out, flags, step_flags});
    };
    for (const int32_t grad : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        add(DSOPT_DTYPE_F32, grad, 0);
        for (const int32_t weight : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16})
            for (const uint32_t flags : {0, int(DSOPT_OPTIMIZER_NO_MASTER)}) add(weight, grad, flags);
    }
    return forms;
}
/// A formula and the settings of a group that select it.
struct Formula {
    const char *name;
    int32_t algorithm, flags;
    double momentum;
};
constexpr Formula kFormulas[] = {{"Adam", DSOPT_ALGORITHM_ADAM, 0, 0},
                                 {"AdamW", DSOPT_ALGORITHM_ADAMW, 0, 0},
                                 {"Lamb", DSOPT_ALGORITHM_LAMB, 0, 0},
                                 {"LambEpsInside", DSOPT_ALGORITHM_LAMB, DSOPT_GROUP_EPS_INSIDE_SQRT, 0},
                                 {"Legacy", DSOPT_ALGORITHM_ADAM_LEGACY, 0, 0},
                                 {"LegacyEpsInside", DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_GROUP_EPS_INSIDE_SQRT, 0},
                                 {"Sgd", DSOPT_ALGORITHM_SGD, 0, 0},
                                 {"Momentum", DSOPT_ALGORITHM_SGD, 0, 0.9},
                                 {"Nesterov", DSOPT_ALGORITHM_SGD, DSOPT_GROUP_NESTEROV, 0.9},
                                 {"Adagrad", DSOPT_ALGORITHM_ADAGRAD, 0, 0},
                                 {"AdagradEpsInside", DSOPT_ALGORITHM_ADAGRAD, DSOPT_GROUP_EPS_INSIDE_SQRT, 0},
                                 {"Lion", DSOPT_ALGORITHM_LION, 0, 0}};

/// Returns the bits after two steps on sizes around register sizes, aligned to cache lines or not.
std::string train(const Form &form, const Formula &formula) {
    std::vector<Shape> shapes;
    for (const int64_t size : {1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 255, 257, 4115})
        for (const size_t offset : {0, 4}) shapes.push_back({size, form.weight, form.grad, offset});
    dsopt_group group = make_group(formula.algorithm);
    group.flags |= formula.flags;
    group.momentum = formula.momentum;
    const Trainer trainer(shapes, group, optimizer_desc(0, form.optimizer_flags), context_desc(1));
    std::vector<Array> outs;
    if (form.out >= 0)
        for (const Shape &shape : shapes) outs.emplace_back(form.out, size_t(shape.numel), 7.0f, shape.offset);
    const std::vector<dsopt_tensor> out = list_of(outs);
    std::string all;
    for (uint64_t t = 1; t <= 2; ++t) {
        trainer.model.make_gradients(t);
        dsopt_step step = trainer.arguments();
        if (form.out >= 0) step.out = out.data();
        step.flags = form.step_flags;
        must(trainer.step(step));
        for (const Array &array : outs) all += array.text();
    }
    EXPECT_TRUE(trainer.model.intact());
    for (const Array &array : outs) EXPECT_TRUE(array.intact());
    return all + trainer.text();
}

// Most forms are converted and rounded in registers. Elements after the last full register, and all elements with
// "generic", are converted in tiles.
class StepConversions : public testing::TestWithParam<Formula> {};

LABEL(one_of_many);
LABEL(long_emulated);
TEST_P(StepConversions, GiveTheSameBitsInRegistersAndTiles) {
    int index = 0;
    for (const Form &form : forms()) {
        const std::string wanted = [&] {
            const Isa isa("generic");
            return train(form, GetParam());
        }();
        for (const char *name : {"avx2", "avx512", "avx512_bf16"})
            for (const char *sizes : {kNoCaches, kLargeCaches}) {
                const Isa isa(name);
                const Caches caches(sizes);
                ASSERT_TRUE(same(train(form, GetParam()), wanted)) << name << ' ' << sizes << ", form " << index;
            }
        ++index;
    }
}

INSTANTIATE_TEST_SUITE_P(Formulas, StepConversions, testing::ValuesIn(kFormulas),
                         [](const auto &info) { return std::string(info.param.name); });

TEST(StepOutput, RoundsWeightsIdenticallyWithEveryIsa) {
    std::vector<float> values; // ties, their neighbours, subnormals, infinities, NaNs
    for (uint32_t high = 0; high < 0x10000; ++high)
        for (const uint32_t low : {0x0000u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const uint32_t bits = high << 16 | low;
            float value;
            std::memcpy(&value, &bits, sizeof value);
            values.push_back(value);
        }
    const Array grads(DSOPT_DTYPE_F32, values.size(), 1.0f);
    const dsopt_tensor grad = grads.tensor();
    for (const int32_t dtype : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        std::string wanted;
        for (const char *name : kIsas) {
            const Isa isa(name);
            const Context ctx = make_context(2);
            dsopt_group group = make_group(DSOPT_ALGORITHM_SGD);
            group.lr = 0; // the weights do not change
            Trainer trainer(ctx, optimizer_desc(), group, {Array(DSOPT_DTYPE_F32, values)});
            const Array outs(dtype, values.size(), 0);
            const dsopt_tensor out = outs.tensor();
            DSOPT_NEW(dsopt_step, step);
            step.grads = &grad;
            step.count = 1;
            step.out = &out;
            must(trainer.step(step));
            if (wanted.empty()) wanted = outs.text();
            EXPECT_TRUE(same(outs.text(), wanted)) << name;
        }
    }
}

// --------------------------------------------------------------------------------------------------- order and packing
class ListOrder : public testing::TestWithParam<int32_t> {};

LABEL_PARAMS(long_emulated, "Adam");
LABEL_PARAMS(long_emulated, "AdamLegacy");
LABEL_PARAMS(long_emulated, "Sgd");
LABEL_PARAMS(long_emulated, "Adagrad");
TEST_P(ListOrder, ChangesNoBit) {
    std::vector<Shape> shapes;
    int64_t content = 0;
    for (const Shape &shape : mixed_shapes()) {
        shapes.push_back(shape);
        shapes.back().content = content++;
    }
    const float scale = 32; // a power of two: exact
    const auto train = [&](const Trainer &trainer, size_t bad) {
        for (uint64_t t = 1; t <= 4; ++t) {
            trainer.model.make_gradients(t);
            if (t == 3) trainer.model.grads[bad].set(0, kNaN); // this step is skipped
            dsopt_step step = trainer.arguments();
            step.grad_scale = on_device(scale);
            must(trainer.step(step));
        }
        EXPECT_EQ(trainer.report().skipped, 1);
    };
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS);
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    const Trainer reference_order(shapes, make_group(GetParam()), desc, context_desc(2));
    const auto large = std::max_element(shapes.begin(), shapes.end(),
                                        [](const Shape &a, const Shape &b) { return a.numel < b.numel; });
    const auto bad = size_t(large - shapes.begin());
    train(reference_order, bad);
    desc.flags = 0;
    Random random(5);
    for (int round = 0; round < 3; ++round) {
        std::vector<size_t> order(shapes.size());
        std::iota(order.begin(), order.end(), size_t(0));
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(random.below(int(i)))]);
        std::vector<Shape> permuted;
        for (const size_t i : order) permuted.push_back(shapes[i]);
        const Trainer other(permuted, make_group(GetParam()), desc, context_desc(3));
        train(other, size_t(std::find(order.begin(), order.end(), bad) - order.begin()));
        for (size_t i = 0; i < order.size(); ++i) {
            ASSERT_TRUE(same(other.model.params[i].text(), reference_order.model.params[order[i]].text())) << order[i];
            for (const dsopt_state_info &info : other.state()) {
                if (info.param != int64_t(i)) continue;
                ASSERT_TRUE(same_bits(exported(other.opt(), int64_t(i), info.name),
                                      exported(reference_order.opt(), int64_t(order[i]), info.name)))
                    << order[i] << " " << info.name;
            }
        }
    }
}
INSTANTIATE_TEST_SUITE_P(Algorithms, ListOrder, testing::ValuesIn(kStandardRules), algorithm_name);

class SplitTensor : public testing::TestWithParam<int32_t> {};

TEST_P(SplitTensor, HasTheBitsOfTheWholeTensor) {
    constexpr int64_t kNumel = 20000;
    for (const int32_t dtype : kDtypes) {
        const float scale = dtype == DSOPT_DTYPE_F16 ? 32 : 1;
        const Trainer whole({{kNumel, dtype, dtype}}, make_group(GetParam()), optimizer_desc(), context_desc(2));
        for (uint64_t t = 1; t <= 3; ++t) {
            whole.model.make_gradients(t);
            dsopt_step step = whole.arguments();
            step.grad_scale = on_device(scale);
            must(whole.step(step));
        }
        Random random(static_cast<uint64_t>(dtype));
        for (int round = 0; round < 8; ++round) {
            std::vector<int64_t> cuts = {0, kNumel};
            const int64_t edges[] = {1, 4095, 4096, 4097, 8192, 19999};
            if (round < 6)
                cuts.push_back(edges[round]);
            else
                for (int i = 0; i < 20; ++i) cuts.push_back(random.below(int(kNumel) + 1)); // some pieces are empty
            std::sort(cuts.begin(), cuts.end());

            const Model model({{kNumel, dtype, dtype}});
            const Context context = make_context(context_desc(3));
            const Optimizer opt = make_optimizer(context);
            const auto piece_of = [&](const Array &buffer, size_t i) {
                return dsopt_tensor{buffer.data() + size_t(cuts[i]) * size_of(dtype), cuts[i + 1] - cuts[i], dtype, 0};
            };
            std::vector<dsopt_param> params;
            std::vector<dsopt_tensor> grads;
            for (size_t i = 0; i + 1 < cuts.size(); ++i) {
                params.push_back(param_of(piece_of(model.params[0], i)));
                grads.push_back(piece_of(model.grads[0], i));
            }
            const dsopt_group group = make_group(GetParam());
            ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, params.data(), int64_t(params.size())));
            for (uint64_t t = 1; t <= 3; ++t) {
                model.make_gradients(t);
                DSOPT_NEW(dsopt_step, step);
                step.grads = grads.data();
                step.count = int64_t(grads.size());
                step.grad_scale = on_device(scale);
                ASSERT_OK(dsopt_optimizer_step(opt.get(), &step));
            }
            ASSERT_TRUE(same(model.text(), whole.model.text())) << round;
        }
    }
}
INSTANTIATE_TEST_SUITE_P(ElementWise, SplitTensor, testing::ValuesIn(kElementWise), algorithm_name);

// Scaling by a power of two is exact: grad_scale divides the gradients without rounding.
TEST(GradScale, UndoesAPowerOfTwoExactly) {
    for (const int32_t algorithm : kStandardRules) {
        const Trainer plain(shapes_of({5000}), make_group(algorithm)), scaled(shapes_of({5000}), make_group(algorithm));
        const float scale = 1024;
        for (uint64_t t = 1; t <= 3; ++t) {
            plain.train(t);
            scaled.model.make_gradients(t);
            for (int64_t i = 0; i < 5000; ++i) scaled.model.grads[0].as<float>()[i] *= scale;
            dsopt_step step = scaled.arguments();
            step.grad_scale = on_device(scale);
            must(scaled.step(step));
        }
        EXPECT_TRUE(same(plain.text(), scaled.text())) << algorithm;
    }
}

// ------------------------------------------------------------------------------------------------ floating-point modes
#if defined(__x86_64__)
constexpr unsigned kDefault = 0x1f80, kFlush = 0x8040; // FTZ and DAZ

struct Mode {
    explicit Mode(unsigned csr) : saved_(_mm_getcsr()) { _mm_setcsr(csr); }
    ~Mode() { _mm_setcsr(saved_); }
    unsigned saved_;
};

/// Returns the bits after three steps in a floating-point mode. Weights and gradients contain denormals.
std::string train_in_mode(unsigned csr, const dsopt_context_desc &desc, uint32_t flags) {
    Trainer trainer(mixed_shapes(), optimizer_desc(0.5, flags), desc);
    for (const int32_t algorithm : kStandardRules) {
        dsopt_group group = make_group(algorithm);
        group.lr = 1e-3;
        trainer.add(group, 6);
    }
    for (const Array &param : trainer.model.params)
        for (int64_t i = 0; i < param.numel(); i += 3) {
            if (param.dtype() == DSOPT_DTYPE_F32)
                param.as<float>()[i] = float_of(uint32_t(i) + 1); // denormal
            else
                param.as<uint16_t>()[i] = uint16_t(i % 128 + 1);
        }
    std::vector<Array> outs;
    for (const Array &param : trainer.model.params)
        outs.emplace_back(param.dtype() == DSOPT_DTYPE_F32 ? DSOPT_DTYPE_F16 : DSOPT_DTYPE_F32, param.size(), 0.0f);
    const std::vector<dsopt_tensor> out = list_of(outs);
    std::string all;
    for (uint64_t t = 1; t <= 3; ++t) {
        trainer.model.make_gradients(t);
        for (const Array &grad : trainer.model.grads)
            for (int64_t i = 0; i < grad.numel(); i += 5)
                if (grad.dtype() == DSOPT_DTYPE_F32) grad.as<float>()[i] = float_of(uint32_t(i) * 7 + 1);
        dsopt_step step = trainer.arguments();
        step.out = out.data();
        const Mode mode(csr);
        const dsopt_status status = dsopt_optimizer_step(trainer.opt(), &step);
        EXPECT_EQ(_mm_getcsr(), csr);
        must(status);
    }
    for (const Array &buffer : outs) all += buffer.text();
    return all + trainer.text();
}

class CallersFloatMode : public testing::TestWithParam<unsigned> {};

LABEL(one_of_many);
LABEL(long_emulated);
TEST_P(CallersFloatMode, ChangesNoBitAndIsRestored) {
    for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_NO_MASTER)}) {
        const std::string wanted = train_in_mode(kDefault, context_desc(1), flags);
        for (const char *name : kIsas) {
            const Isa isa(name);
            EXPECT_TRUE(same(train_in_mode(GetParam(), context_desc(1), flags), wanted)) << name;
        }
        EXPECT_TRUE(same(train_in_mode(GetParam(), context_desc(4), flags), wanted));
        // Threads of the parallel_for hook may be in another mode than the caller.
        dsopt_context_desc desc = context_desc(4);
        Workers workers;
        workers.enter = [] { _mm_setcsr(kDefault | kFlush | _MM_ROUND_UP); };
        desc.parallel_for = Workers::run;
        desc.user = &workers;
        EXPECT_TRUE(same(train_in_mode(GetParam(), desc, flags), wanted));
    }
}

INSTANTIATE_TEST_SUITE_P(Modes, CallersFloatMode,
                         testing::Values(kDefault, kDefault | kFlush, kDefault | _MM_ROUND_DOWN,
                                         kDefault | _MM_ROUND_UP, kDefault | _MM_ROUND_TOWARD_ZERO | kFlush));

TEST(StepFloatExceptions, AreNotRaisedEvenIfUnmasked) {
    const Trainer trainer(shapes_of({5000, 3}, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16), make_group(DSOPT_ALGORITHM_LAMB),
                          optimizer_desc(1.0));
    trainer.model.grads[0].as<uint16_t>()[7] = 0x7c01; // signalling NaN
    const Mode mode(0x1f80 & ~(_MM_MASK_INVALID | _MM_MASK_DIV_ZERO | _MM_MASK_OVERFLOW | _MM_MASK_INEXACT |
                               _MM_MASK_UNDERFLOW | _MM_MASK_DENORM));
    const dsopt_step step = trainer.arguments();
    const dsopt_status status = dsopt_optimizer_step(trainer.opt(), &step);
    EXPECT_EQ(status, DSOPT_OK);
}
#endif

} // namespace bits_same_bits_tests
