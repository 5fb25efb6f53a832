// SPDX-License-Identifier: Apache-2.0
// A training run that is saved and resumed from the checkpoint has the bits of an uninterrupted run, with mixed
// precision, dynamic loss scaling and clipping.
#include "support/harness.h"

using namespace test;

namespace bits_resume_tests {

/// A least-squares problem in fp16 whose scaled gradients sometimes overflow.
struct Training {
    Context ctx;
    Scaler scaler;
    Trainer trainer;
    std::vector<Array> targets;
    std::string skips; // per step: X = skipped, . = not

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
            skips += trainer.report().last_skipped ? 'X' : '.';
        }
    }
};

class ResumedTraining : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, ResumedTraining,
                         testing::Values(DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
                                         DSOPT_ALGORITHM_ADAM_LEGACY),
                         algorithm_name);

LABEL(long_emulated);
TEST_P(ResumedTraining, HasTheSameBitsWithDynamicLossScaling) {
    const Folder folder;
    const std::string path = folder / "run.safetensors";
    for (const int masters_mode : {0, 1, 2}) {
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = masters_mode == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
        desc.masters = masters_mode == 1 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
        constexpr int total = 60;
        Training uninterrupted(2, GetParam(), desc);
        uninterrupted.steps(total);
        EXPECT_NE(uninterrupted.skips.find('X'), std::string::npos) << "no step overflowed";
        EXPECT_GT(uninterrupted.trainer.report().calls, uninterrupted.trainer.report().skipped * 2);
        for (const int saved_at : {0, 1, 23, 24, 59}) {
            Training first(3, GetParam(), desc), second(1, GetParam(), desc);
            first.steps(saved_at);
            ASSERT_OK(dsopt_optimizer_save(first.trainer.opt(), path.c_str(), nullptr));
            // The framework, not dsopt, restores the parameters.
            for (size_t i = 0; i < first.trainer.weights().size(); ++i)
                for (size_t k = 0; k < first.trainer.weight(i).size(); ++k)
                    second.trainer.weight(i).set(k, first.trainer.weight(i)[k]);
            ASSERT_OK(dsopt_optimizer_load(second.trainer.opt(), path.c_str(), nullptr));
            EXPECT_EQ(second.trainer.report().loss_scale, first.trainer.report().loss_scale);
            second.steps(total - saved_at);
            EXPECT_EQ(first.skips + second.skips, uninterrupted.skips) << "saved after " << saved_at;
            EXPECT_TRUE(same(second.trainer.snapshot(), uninterrupted.trainer.snapshot()))
                << "saved after " << saved_at;
            EXPECT_EQ(second.trainer.report().calls, total);
        }
    }
}

} // namespace bits_resume_tests
