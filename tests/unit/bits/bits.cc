// SPDX-License-Identifier: Apache-2.0
// Results do not depend on how the work is cut: threads, instruction sets, chunks and pools; and a run that is saved and resumed goes on with the same bits. With mixed precision, norms and clipping on.
#include "support/harness.h"
#include <filesystem>
#include <unistd.h>

using namespace test;

namespace {

dsopt_optimizer_desc empty() {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    return desc;
}

/// Backwards and on two threads, in another order than the library's threads.
void odd_pool(void *calls, int64_t n, void (*body)(void *, int64_t), void *arg) {
    ++*static_cast<int *>(calls);
    std::thread other([&] {
        for (int64_t i = n - 1; i >= 0; i -= 2) body(arg, i);
    });
    for (int64_t i = n - 2; i >= 0; i -= 2) body(arg, i);
    other.join();
}

// -------------------------------------------------------------------------------------------------- how work is cut
struct Way {
    int threads;
    const char *isa;
    int64_t chunk;
    bool pool;
};

/// Everything that 4 steps leave: state, parameters, reports.
Snapshot run(const Way &way, dsopt_optimizer_desc desc, const std::vector<Array> &weights,
             const std::vector<std::vector<Array>> &grads) {
    setenv("DSOPT_ISA", way.isa, 1);
    DSOPT_NEW(dsopt_context_desc, where);
    where.threads = way.threads;
    where.chunk = way.chunk;
    dsopt_context *made = nullptr;
    const dsopt_status status = dsopt_context_create(&where, &made);
    unsetenv("DSOPT_ISA");
    must(status);
    const Context ctx(made);
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
            s.parallel_for = way.pool ? odd_pool : nullptr;
            s.parallel_user = way.pool ? &calls : nullptr;
        }));
        const dsopt_report report = trainer.report();
        for (const double value : {report.grad_norm, report.dense_norm, report.weight_norm, report.update_norm,
                                   report.divisor, report.loss_scale})
            reports.append(reinterpret_cast<const char *>(&value), sizeof value);
    }
    EXPECT_EQ(calls > 0, way.pool && way.threads > 1);
    Snapshot all = trainer.snapshot();
    all["reports"] = reports;
    return all;
}

class Cut : public testing::TestWithParam<int> {}; // standard, compat flat, compat per tensor
INSTANTIATE_TEST_SUITE_P(, Cut, testing::Values(0, 1, 2), [](const auto &info) {
    return std::string(std::array{"Standard", "CompatFlat", "CompatPerTensor"}[size_t(info.param)]);
});

TEST_P(Cut, ThreadsInstructionSetsChunksAndPoolsGiveTheSameBits) {
    Random random(1);
    const int32_t dtypes[] = {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32};
    const std::vector<size_t> sizes = {1, 20481, 0, 4095, 4096, 4097, 33, 30000, 1025, 8192, 12289, 16385};
    std::vector<Array> weights;
    for (const size_t size : sizes) weights.emplace_back(dtypes[weights.size() % 3], random.floats(size));
    std::vector<std::vector<Array>> grads(4);
    for (size_t step = 0; step < grads.size(); ++step)
        for (const size_t size : sizes)
            grads[step].emplace_back(dtypes[(grads[step].size() + step) % 3], random.floats(size, -90, 90));
    grads[2][7].set(29999, kInf); // one skipped step among them
    dsopt_optimizer_desc desc = empty();
    desc.compat = GetParam() == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
    desc.masters = GetParam() == 1 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
    desc.max_norm = 2;
    desc.max_value = 0.1;
    const Snapshot wanted = run({1, "generic", 4096, false}, desc, weights, grads);
    for (const char *isa : kIsas)
        for (const int threads : {1, 2, 3, 5, 8})
            EXPECT_TRUE(same(wanted, run({threads, isa, 4096, false}, desc, weights, grads)))
                << isa << ", " << threads << " threads";
    EXPECT_TRUE(same(wanted, run({3, "avx2", 16384, false}, desc, weights, grads))) << "larger chunks";
    EXPECT_TRUE(same(wanted, run({5, "avx2", 0, true}, desc, weights, grads))) << "the caller's pool";
}

// -------------------------------------------------------------------------------------------------- saved and resumed
/// A least-squares problem in fp16 whose scaled gradients overflow now and then.
struct Training {
    Context ctx;
    Scaler scaler;
    Trainer trainer;
    std::vector<Array> targets;
    std::string log;

    static Trainer make(const Context &ctx, const Scaler &scaler, int32_t algorithm, dsopt_optimizer_desc desc) {
        desc.scaler = scaler.get();
        desc.max_norm = 0.5;
        Random random(3);
        std::vector<Array> weights;
        for (const size_t n : {size_t(100), size_t(1500), size_t(1)})
            weights.emplace_back(DSOPT_DTYPE_F16, random.floats(n));
        return Trainer(ctx, desc, group_of(algorithm, 0.02), weights);
    }
    Training(int threads, int32_t algorithm, const dsopt_optimizer_desc &desc) :
        ctx(make_context(threads)),
        scaler(make_scaler(ctx, 4096, 4)),
        trainer(make(ctx, scaler, algorithm, desc)) {
        Random random(4);
        for (const size_t n : {size_t(100), size_t(1500), size_t(1)})
            targets.emplace_back(DSOPT_DTYPE_F32, random.floats(n));
    }
    void steps(int count) {
        for (int step = 0; step < count; ++step) {
            std::vector<Array> grads;
            const float scale = on_host(dsopt_scaler_device_scale(scaler.get()));
            for (size_t i = 0; i < targets.size(); ++i) {
                std::vector<float> g = trainer.weight(i).floats();
                for (size_t k = 0; k < g.size(); ++k) g[k] = (g[k] - targets[i][k]) * 8 * scale;
                grads.emplace_back(DSOPT_DTYPE_F16, g);
            }
            must(trainer.step(grads));
            log += trainer.report().last_skipped ? 'X' : '.';
        }
    }
};

class Resumed : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, Resumed,
                         testing::Values(DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
                                         DSOPT_ALGORITHM_ADAM_LEGACY),
                         algorithm_name);

LABEL(long_emulated);
TEST_P(Resumed, RunWithDynamicScalingGoesOnWithTheSameBits) {
    const Folder folder;
    const std::string path = folder / "run.safetensors";
    for (const int mode : {0, 1, 2}) {
        dsopt_optimizer_desc desc = empty();
        desc.compat = mode == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
        desc.masters = mode == 1 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
        constexpr int total = 60;
        Training straight(2, GetParam(), desc);
        straight.steps(total);
        EXPECT_NE(straight.log.find('X'), std::string::npos) << "no overflow happened";
        EXPECT_GT(straight.trainer.report().calls, straight.trainer.report().skipped * 2);
        for (const int middle : {0, 1, 23, 24, 59}) {
            Training first(3, GetParam(), desc), second(1, GetParam(), desc);
            first.steps(middle);
            ASSERT_OK(dsopt_optimizer_save(first.trainer.opt(), path.c_str(), nullptr));
            // What the framework restores by itself: the model.
            for (size_t i = 0; i < first.trainer.weights().size(); ++i)
                for (size_t k = 0; k < first.trainer.weight(i).size(); ++k)
                    second.trainer.weight(i).set(k, first.trainer.weight(i)[k]);
            ASSERT_OK(dsopt_optimizer_load(second.trainer.opt(), path.c_str(), nullptr));
            EXPECT_EQ(second.trainer.report().loss_scale, first.trainer.report().loss_scale);
            second.steps(total - middle);
            EXPECT_EQ(first.log + second.log, straight.log) << "saved after " << middle;
            EXPECT_TRUE(same(second.trainer.snapshot(), straight.trainer.snapshot())) << "saved after " << middle;
            EXPECT_EQ(second.trainer.report().calls, total);
        }
    }
}

} // namespace
