// SPDX-License-Identifier: Apache-2.0
// Steps of several ranks, one thread each: global norms, agreement on skipped steps, and failing comms.
#include "support/harness.h"

using namespace test;

namespace comm_ranks_tests {

dsopt_optimizer_desc empty_desc() {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    return desc;
}
double squares(const Array &array) {
    long double sum = 0;
    for (const float x : array.floats()) sum += static_cast<long double>(x) * x;
    return double(sum);
}
void expect_near(double got, double wanted) {
    EXPECT_LE(std::fabs(got - wanted), 1e-12 * std::fabs(wanted)) << got << ", " << wanted;
}

// ------------------------------------------------------------------------------------------------------ data parallel
TEST(DataParallelStep, SkipsOnEveryRankIfOneOverflows) {
    constexpr int ranks = 3;
    const CommId id = new_id();
    std::array<std::vector<double>, ranks> scales;
    std::array<Snapshot, ranks> ends;
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        const Scaler scaler = make_scaler(ctx, 64, 2);
        dsopt_optimizer_desc desc = empty_desc();
        desc.data = comm.get();
        desc.scaler = scaler.get();
        desc.max_norm = 0.5;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW),
                        std::vector<Array>{Array(DSOPT_DTYPE_F16, 100, 1), Array(DSOPT_DTYPE_BF16, 7, 1)});
        Random random(1);
        for (int step = 0; step < 12; ++step) {
            std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, random.floats(100, -64, 64)),
                                        Array(DSOPT_DTYPE_BF16, random.floats(7, -64, 64))};
            const int bad = step % 4 - 1; // no rank in every fourth step, else one rank
            if (bad == rank) grads[size_t(step % 2)].set(3, step % 3 ? kInf : kNaN);
            const Snapshot before = trainer.snapshot();
            ASSERT_OK(trainer.step(grads));
            const dsopt_report report = trainer.report();
            EXPECT_EQ(report.last_skipped, bad >= 0);
            EXPECT_EQ(report.nonfinite, bad == rank) << "nonfinite counts only this rank's gradients";
            EXPECT_EQ(report.first_bad, bad == rank ? step % 2 : -1);
            EXPECT_EQ(trainer.snapshot().at("param 0") == before.at("param 0"), bad >= 0);
            scales[size_t(rank)].push_back(report.loss_scale);
        }
        ends[size_t(rank)] = trainer.snapshot();
    });
    EXPECT_EQ(scales[0], (std::vector<double>{64, 32, 16, 8, 8, 4, 2, 1, 1, 1, 1, 1}));
    for (int rank = 1; rank < ranks; ++rank) {
        EXPECT_EQ(scales[size_t(rank)], scales[0]);
        EXPECT_TRUE(same(ends[size_t(rank)], ends[0])) << "rank " << rank;
    }
}

TEST(DataParallelStep, AgreesOnEveryReasonToSkip) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        dsopt_optimizer_desc desc = empty_desc();
        desc.data = comm.get();
        desc.max_norm = 1;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
        const std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, {3, 4})};
        const float bad_scale = rank == 1 ? kNaN : 1.0f, negative = rank == 0 ? -1.0f : 5.0f,
                    infinite = rank == 1 ? kInf : 5.0f;
        const int32_t skip = rank == 0;
        struct {
            const char *what;
            std::function<void(dsopt_step &)> change;
        } const reasons[] = {
            {"skip", [&](dsopt_step &s) { s.skip = on_device(skip); }},
            {"grad_scale", [&](dsopt_step &s) { s.grad_scale = on_device(bad_scale); }},
            {"negative norm of the caller", [&](dsopt_step &s) { s.grad_norms = on_device(negative); }},
            {"infinite norm of the caller", [&](dsopt_step &s) { s.grad_norms = on_device(infinite); }}};
        for (const auto &reason : reasons) {
            const Snapshot before = trainer.snapshot();
            ASSERT_OK(trainer.step(grads, reason.change));
            EXPECT_EQ(trainer.report().last_skipped, 1) << reason.what << ", rank " << rank;
            EXPECT_TRUE(same(before, trainer.snapshot())) << reason.what << ", rank " << rank;
        }
        const float good = 5;
        ASSERT_OK(trainer.step(grads, [&](dsopt_step &s) { s.grad_norms = on_device(good); }));
        EXPECT_EQ(trainer.report().last_skipped, 0);
    });
}

TEST(DataParallelStep, SharesACommAndAScalerBetweenOptimizers) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        const Scaler scaler = make_scaler(ctx, 8, 1, DSOPT_SCALER_SHARED);
        dsopt_optimizer_desc desc = empty_desc();
        desc.data = comm.get();
        desc.scaler = scaler.get();
        Trainer a(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
        Trainer b(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
        const std::vector<Array> good = {Array(DSOPT_DTYPE_F16, 2, 1)}, bad = {Array(DSOPT_DTYPE_F16, 2, kInf)};
        for (int step = 0; step < 6; ++step) {
            must(a.step(step == 2 && rank == 1 ? bad : good));
            must(b.step(step == 4 && rank == 0 ? bad : good));
            must(dsopt_scaler_update(scaler.get(), nullptr, nullptr));
            EXPECT_EQ(a.report().last_skipped, step == 2);
            EXPECT_EQ(b.report().last_skipped, step == 4);
        }
        EXPECT_EQ(info_of(scaler).scale, 4); // 8 16 8 8 4 4
        EXPECT_EQ(info_of(scaler).last_overflow, 4);
    });
}

// ----------------------------------------------------------------------------------------------------- model parallel
/// The whole model: a sharded matrix, a bias on both ranks, and a replicated tensor that another pipeline stage counts.
struct Model {
    std::vector<Array> weights, grads;
    explicit Model(Random &random, double size = 50) {
        for (const size_t n : {size_t(9000), size_t(77), size_t(30)}) {
            weights.emplace_back(DSOPT_DTYPE_F16, random.floats(n));
            grads.emplace_back(DSOPT_DTYPE_F16, random.floats(n, -size, size));
        }
    }
    static Array half(const Array &whole, int rank) {
        const std::vector<float> values = whole.floats();
        const auto middle = values.begin() + int64_t(values.size() / 3); // shards of different sizes
        return Array(whole.dtype(),
                     rank == 0 ? std::vector<float>(values.begin(), middle) : std::vector<float>(middle, values.end()));
    }
    std::vector<Param> params(int rank) const {
        return {{half(weights[0], rank), "matrix", DSOPT_PARAM_MODEL_PARALLEL},
                {weights[1], "bias"},
                {weights[2], "tied", DSOPT_PARAM_REPLICATED}};
    }
    std::vector<Array> gradients(int rank) const { return {half(grads[0], rank), grads[1], grads[2]}; }
};

TEST(ModelParallelStep, ClipsByTheNormOfTheWholeModel) {
    for (const bool group_clips : {false, true}) {
        Random random(2);
        const Model model(random);
        dsopt_optimizer_desc desc = empty_desc();
        dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
        group.beta1 = 0; // exp_avg is the clipped gradient
        desc.max_norm = group_clips ? 0 : 0.5;
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        group.max_norm = group_clips ? 0.5 : 0;
        const Context ctx = make_context(1);
        Trainer whole(ctx, desc, group,
                      {{model.weights[0]}, {model.weights[1]}, {model.weights[2], "tied", DSOPT_PARAM_REPLICATED}});
        ASSERT_OK(whole.step(model.grads));
        const double norm = std::sqrt(squares(model.grads[0]) + squares(model.grads[1]));
        expect_near(whole.report().grad_norm, norm);
        const std::vector<float> split = whole.state("exp_avg", 0), tied = whole.state("exp_avg", 2);
        const CommId id = new_id();
        run_ranks(2, [&](int rank) {
            const Comm comm = local_comm(ctx, id, rank, 2);
            dsopt_optimizer_desc shard_desc = desc;
            shard_desc.model = comm.get();
            Trainer part(ctx, shard_desc, group, model.params(rank));
            ASSERT_OK(part.step(model.gradients(rank)));
            expect_near(part.report().grad_norm, norm);
            if (!group_clips) expect_near(part.report().divisor, (norm + 1e-6) / 0.5);
            const std::vector<float> wanted = Model::half(Array(DSOPT_DTYPE_F32, split), rank).floats();
            const std::vector<float> got = part.state("exp_avg", 0);
            ASSERT_EQ(got.size(), wanted.size());
            for (size_t i = 0; i < got.size(); ++i) ASSERT_FLOAT_EQ(got[i], wanted[i]);
            for (size_t i = 0; i < 30; ++i)
                EXPECT_FLOAT_EQ(part.state("exp_avg", 2)[i], tied[i]) << "replicated tensors are clipped, too";
        });
    }
}

TEST(ModelParallelStep, SkipsOnEveryRankIfAnyTensorOverflows) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        Random random(3);
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        const Scaler scaler = make_scaler(ctx, 1024);
        dsopt_optimizer_desc desc = empty_desc();
        desc.model = comm.get();
        desc.scaler = scaler.get();
        const Model model(random);
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), model.params(rank));
        double scale = 1024;
        for (const int bad_rank : {0, 1})
            for (const size_t tensor : {size_t(0), size_t(1), size_t(2)}) {
                std::vector<Array> grads = model.gradients(rank);
                if (rank == bad_rank) grads[tensor].set(5, kInf);
                ASSERT_OK(trainer.step(grads));
                EXPECT_EQ(trainer.report().last_skipped, 1) << "rank " << bad_rank << ", tensor " << tensor;
                EXPECT_EQ(info_of(scaler).scale, scale /= 2);
            }
        ASSERT_OK(trainer.step(model.gradients(rank)));
        EXPECT_EQ(trainer.report().last_skipped, 0);
    });
}

// ------------------------------------------------------------------------------------------------------------ experts
TEST(ExpertParallelStep, SumsNormsOfExpertsAndCountsDenseOnce) {
    // Four ranks. Expert comms are {0, 1} and {2, 3}, and each has experts 0 and 1. Data comms are {0, 2} and {1, 3}.
    const CommId expert_ids[] = {new_id(), new_id()}, data_ids[] = {new_id(), new_id()};
    Random random(4);
    const Array dense(DSOPT_DTYPE_F16, random.floats(6000, -20, 20));
    const Array experts[] = {Array(DSOPT_DTYPE_F16, random.floats(5000, -20, 20)),
                             Array(DSOPT_DTYPE_F16, random.floats(300, -90, 90))};
    const double expert_squares = squares(experts[0]) + squares(experts[1]);
    std::array<std::string, 4> dense_weights;
    run_ranks(4, [&](int rank) {
        const int pair = rank / 2, index = rank % 2;
        const Context ctx = make_context(1);
        const Comm expert = local_comm(ctx, expert_ids[pair], index, 2),
                   data = local_comm(ctx, data_ids[index], pair, 2);
        const Scaler scaler = make_scaler(ctx, 4);
        dsopt_comm *const list[] = {expert.get()};
        dsopt_optimizer_desc desc = empty_desc();
        desc.data = data.get();
        desc.experts = list;
        desc.expert_count = 1;
        desc.scaler = scaler.get();
        desc.max_norm = 1;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                        {{Array(DSOPT_DTYPE_F16, 6000, 1), "dense"},
                         {Array(DSOPT_DTYPE_F16, experts[index].size(), 1), "expert", 0, 1}});
        ASSERT_OK(trainer.step({dense, experts[index]}));
        const dsopt_report report = trainer.report();
        expect_near(report.dense_norm, std::sqrt(squares(dense)) / 4);
        expect_near(report.expert_norm, std::sqrt(expert_squares) / 4);
        expect_near(report.grad_norm, std::sqrt(squares(dense) + expert_squares) / 4);
        expect_near(report.divisor, 4 * (report.grad_norm + 1e-6));
        for (int bad = 0; bad < 4; ++bad) { // in the expert of one rank
            std::vector<Array> grads = {dense, experts[index]};
            if (rank == bad) grads[1].set(0, kNaN);
            ASSERT_OK(trainer.step(grads));
            EXPECT_EQ(trainer.report().last_skipped, 1) << "rank " << rank << ", bad " << bad;
        }
        EXPECT_EQ(info_of(scaler).updates, 5);
        dense_weights[size_t(rank)] = trainer.weight(0).text();
    });
    for (const std::string &weights : dense_weights) EXPECT_EQ(weights, dense_weights[0]);
}

TEST(ExpertParallelStep, ReducesEachKindOfExpertsOverItsComm) {
    // Experts of kind 1 are distributed over {0, 1} and {2, 3}, those of kind 2 over {0, 2} and {1, 3}.
    const CommId first_ids[] = {new_id(), new_id()}, second_ids[] = {new_id(), new_id()};
    Random random(5);
    const Array dense(DSOPT_DTYPE_F32, random.floats(40)),
        first[] = {Array(DSOPT_DTYPE_F32, random.floats(50)), Array(DSOPT_DTYPE_F32, random.floats(60))},
        second[] = {Array(DSOPT_DTYPE_F32, random.floats(70)), Array(DSOPT_DTYPE_F32, random.floats(80))};
    const double experts = squares(first[0]) + squares(first[1]) + squares(second[0]) + squares(second[1]);
    run_ranks(4, [&](int rank) {
        const int row = rank / 2, column = rank % 2;
        const Context ctx = make_context(1);
        const Comm a = local_comm(ctx, first_ids[row], column, 2), b = local_comm(ctx, second_ids[column], row, 2);
        dsopt_comm *const list[] = {a.get(), b.get()};
        dsopt_optimizer_desc desc = empty_desc();
        desc.experts = list;
        desc.expert_count = 2;
        desc.max_norm = 1;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                        {{Array(DSOPT_DTYPE_F32, 40, 1), "dense"},
                         {Array(DSOPT_DTYPE_F32, first[column].size(), 1), "first", 0, 1},
                         {Array(DSOPT_DTYPE_F32, second[row].size(), 1), "second", 0, 2}});
        ASSERT_OK(trainer.step({dense, first[column], second[row]}));
        expect_near(trainer.report().expert_norm, std::sqrt(experts));
        expect_near(trainer.report().grad_norm, std::sqrt(experts + squares(dense)));
    });
}

TEST(ExpertParallelStep, RefusesExpertNumbersWithoutComms) {
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    dsopt_comm *const list[] = {comm.get(), nullptr};
    dsopt_optimizer_desc desc = empty_desc();
    dsopt_optimizer *opt = nullptr;
    desc.expert_count = 1;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "expert"));
    desc.experts = list;
    desc.expert_count = 0;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "expert"));
    desc.expert_count = 2;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "experts"));
    desc.expert_count = -1;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "expert_count"));
    desc.expert_count = 1;
    Trainer trainer(ctx, desc);
    for (const int32_t expert : {-1, 2})
        EXPECT_TRUE(
            refused(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 2, 1), "w", 0, expert}}),
                    DSOPT_ERR_ARGUMENT, "'w'"));
    EXPECT_TRUE(refused(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 2, 1), "w", 32}}),
                        DSOPT_ERR_ARGUMENT, "'w'"));
    EXPECT_EQ(opt, nullptr);
}

// ------------------------------------------------------------------------------------------------ all comms at once
TEST(ExpertParallelStep, AgreesOverModelDataAndExpertComms) {
    const auto number = [](int m, int d, int e) { return m + 2 * d + 4 * e; };
    Random random(6);
    std::vector<Array> sharded, expert_whole;          // by m; by e
    std::vector<std::vector<Array>> expert_sharded(2); // by e, m
    const Array dense(DSOPT_DTYPE_BF16, random.floats(500, -3, 3));
    for (size_t i = 0; i < 2; ++i) {
        sharded.emplace_back(DSOPT_DTYPE_F16, random.floats(4500 + 10 * i, -3, 3));
        expert_whole.emplace_back(DSOPT_DTYPE_F32, random.floats(700 + i, -3, 3));
        for (size_t k = 0; k < 2; ++k)
            expert_sharded[i].emplace_back(DSOPT_DTYPE_F16, random.floats(800 + 10 * i + k, -3, 3));
    }
    double dense_squares = squares(dense) + squares(sharded[0]) + squares(sharded[1]), expert_squares = 0;
    for (size_t e = 0; e < 2; ++e)
        expert_squares += squares(expert_whole[e]) + squares(expert_sharded[e][0]) + squares(expert_sharded[e][1]);
    std::vector<CommId> model_ids, data_ids, expert_ids;
    for (int i = 0; i < 4; ++i) {
        model_ids.push_back(new_id());
        data_ids.push_back(new_id());
        expert_ids.push_back(new_id());
    }
    std::array<double, 8> norms{};
    run_ranks(8, [&](int rank) {
        const int m = rank % 2, d = rank / 2 % 2, e = rank / 4;
        const Context ctx = make_context(1);
        const Comm model = local_comm(ctx, model_ids[size_t(d + 2 * e)], m, 2),
                   data = local_comm(ctx, data_ids[size_t(m + 2 * e)], d, 2),
                   expert = local_comm(ctx, expert_ids[size_t(m + 2 * d)], e, 2);
        dsopt_comm *const list[] = {expert.get()};
        const Scaler scaler = make_scaler(ctx, 256);
        dsopt_optimizer_desc desc = empty_desc();
        desc.model = model.get();
        desc.data = data.get();
        desc.experts = list;
        desc.expert_count = 1;
        desc.scaler = scaler.get();
        desc.max_norm = 0.01;
        const std::vector<Array> grads = {dense, sharded[size_t(m)], expert_whole[size_t(e)],
                                          expert_sharded[size_t(e)][size_t(m)]};
        std::vector<Param> params;
        for (size_t i = 0; i < 4; ++i)
            params.push_back({Array(DSOPT_DTYPE_F16, grads[i].size(), 1), "p" + std::to_string(i),
                              i % 2 ? int32_t(DSOPT_PARAM_MODEL_PARALLEL) : 0, i >= 2});
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), params);
        ASSERT_OK(trainer.step(grads));
        const dsopt_report report = trainer.report();
        expect_near(report.dense_norm, std::sqrt(dense_squares) / 256);
        expect_near(report.expert_norm, std::sqrt(expert_squares) / 256);
        expect_near(report.grad_norm, std::sqrt(dense_squares + expert_squares) / 256);
        norms[size_t(rank)] = report.grad_norm;
        for (int bad = 0; bad < 8; ++bad)
            for (size_t tensor = 0; tensor < 4; ++tensor) {
                std::vector<Array> list_of_grads = grads;
                if (rank == bad) list_of_grads[tensor].set(1, kInf);
                ASSERT_OK(trainer.step(list_of_grads));
                EXPECT_EQ(trainer.report().last_skipped, 1)
                    << "rank " << rank << ", bad " << bad << ", tensor " << tensor;
                must(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_VALUE, 256, nullptr));
            }
        EXPECT_EQ(number(m, d, e), rank);
        EXPECT_EQ(trainer.state("step"), std::vector<float>(4, 1));
    });
    for (const double norm : norms) EXPECT_EQ(norm, norms[0]) << "identical bits on every rank";
}

// --------------------------------------------------------------------------------------------------- comms that fail
enum class Role { data, model, expert };
class StepWithFailingComm : public testing::TestWithParam<Role> {};
INSTANTIATE_TEST_SUITE_P(
    , StepWithFailingComm, testing::Values(Role::data, Role::model, Role::expert), [](const auto &info) {
        return std::string(info.param == Role::data ? "Data" : info.param == Role::model ? "Model" : "Expert");
    });

LABEL_PARAMS(long_emulated, "Model");
LABEL_PARAMS(long_emulated, "Expert");
TEST_P(StepWithFailingComm, ReturnsTheStatusAndChangesNothing) {
    for (const dsopt_status wanted : {DSOPT_ERR_COMM, DSOPT_ERR_TIMEOUT, DSOPT_ERR_ABORTED}) {
        const Context ctx = make_context(2);
        const CommId id = new_id();
        std::array<Comm, 2> comms;
        run_ranks(2, [&](int rank) {
            comms[size_t(rank)] = local_comm(ctx, id, rank, 2, wanted == DSOPT_ERR_TIMEOUT ? 2000 : -1);
        });
        dsopt_comm *const list[] = {comms[0].get()};
        const Scaler scaler = make_scaler(ctx, 64, 1);
        dsopt_optimizer_desc desc = empty_desc();
        desc.scaler = scaler.get();
        desc.max_norm = 1;
        if (GetParam() == Role::data) desc.data = comms[0].get();
        if (GetParam() == Role::model) desc.model = comms[0].get();
        if (GetParam() == Role::expert) desc.experts = list, desc.expert_count = 1;
        Random random(7);
        const std::vector<Array> weights = {Array(DSOPT_DTYPE_F16, random.floats(5000)), Array(DSOPT_DTYPE_BF16, 9, 1)};
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), weights);
        const std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, random.floats(5000)), Array(DSOPT_DTYPE_BF16, 9, 1)};
        std::thread peer([&] { // makes one step
            dsopt_comm *const others[] = {comms[1].get()};
            dsopt_optimizer_desc peer_desc = desc;
            peer_desc.scaler = nullptr;
            if (desc.data != nullptr) peer_desc.data = comms[1].get();
            if (desc.model != nullptr) peer_desc.model = comms[1].get();
            if (desc.experts != nullptr) peer_desc.experts = others;
            Trainer other(ctx, peer_desc, group_of(DSOPT_ALGORITHM_LAMB), weights);
            EXPECT_OK(other.step(grads));
        });
        ASSERT_OK(trainer.step(grads));
        peer.join();
        const Snapshot before = trainer.snapshot();
        const dsopt_report report_before = trainer.report();
        std::vector<Array> grads_after_failure = grads;
        grads_after_failure[0].set(0, kInf);
        const Shared<float> report(DSOPT_REPORT_FLOATS, 77);
        std::thread failing_peer([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            if (wanted == DSOPT_ERR_COMM) comms[1].reset();
            if (wanted == DSOPT_ERR_ABORTED) dsopt_comm_abort(comms[1].get());
        });
        EXPECT_TRUE(refused(trainer.step(grads_after_failure,
                                         [&](dsopt_step &step) {
                                             step.flags = DSOPT_STEP_ZERO_GRADS;
                                             step.report = report.data();
                                         }),
                            wanted));
        failing_peer.join();
        EXPECT_TRUE(same(before, trainer.snapshot()));
        EXPECT_EQ(grads_after_failure[1].text(), grads[1].text()) << "gradients are not zeroed";
        EXPECT_EQ(report[0], 77);
        const dsopt_report report_after = trainer.report();
        EXPECT_EQ(std::memcmp(&report_before, &report_after, sizeof report_after), 0);
        EXPECT_TRUE(refused(trainer.step(grads), wanted)) << "the comm is unusable";
        EXPECT_EQ(info_of(comms[0]).status, wanted);
        MemoryFile file; // the state can still be saved
        EXPECT_OK(file.save(trainer));
    }
}

} // namespace comm_ranks_tests
