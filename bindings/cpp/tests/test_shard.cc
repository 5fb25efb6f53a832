// SPDX-License-Identifier: Apache-2.0
// Sharded state and averages, over ranks that are threads: the bits of optimizers without them.
#include "model.h"
#include <cstring>
#include <memory>

namespace shard_tests {

constexpr int kRanks = 3;
constexpr std::int64_t kBlock = 4096; // parts begin at multiples of it

/// The same gradients on all ranks, and those of one rank.
void set_gradients(Model &model, std::uint32_t step) { model.next_gradients(step); }
void set_gradients_of(Model &model, std::uint32_t step, int rank) {
    model.next_gradients(10 * step + static_cast<std::uint32_t>(rank) + 1);
}

/// Trains on `ranks` ranks, and calls `last(rank, optimizer)` at the end. Returns the weights, the same on all ranks.
template <class Last> std::unique_ptr<Model> train(int ranks, const dsopt::optimizer_options &options, Last &&last) {
    std::vector<std::unique_ptr<Model>> models(static_cast<std::size_t>(ranks));
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    on_ranks(ranks, [&](int rank) {
        std::unique_ptr<Model> &model = models[static_cast<std::size_t>(rank)];
        model = std::make_unique<Model>();
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, ranks);
        dsopt::optimizer_options own = options;
        own.max_norm = 1;
        (own.shard == dsopt::shard::node ? own.node : own.data) = &comm;
        dsopt::optimizer opt(ctx, own);
        opt.add_group(rule(), model->params);
        for (std::uint32_t s = 0; s < 4; ++s) {
            if (own.averages) {
                set_gradients_of(*model, s, rank);
                // Absent on one rank, where it counts as zeros.
                if (rank == 1) model->grads[2] = dsopt::view(static_cast<float *>(nullptr), 4099);
            } else {
                set_gradients(*model, s);
            }
            opt.step(model->grads);
        }
        last(rank, opt);
    });
    for (const auto &model : models) expect_same(*model, *models[0]);
    return std::move(models[0]);
}
std::unique_ptr<Model> train(int ranks, const dsopt::optimizer_options &options) {
    return train(ranks, options, [](int, const dsopt::optimizer &) {});
}

TEST(CppShard, GivesTheBitsOfOneRank) {
    dsopt::optimizer_options options;
    const std::unique_ptr<Model> reference = train(1, options);
    for (const dsopt::shard over : {dsopt::shard::data, dsopt::shard::node}) {
        options.shard = over;
        expect_same(*train(kRanks, options), *reference);
        expect_same(*train(1, options), *reference);
    }
}

TEST(CppShard, GivesTheBitsOfAveragesWithoutIt) {
    dsopt::optimizer_options options;
    options.averages = true;
    const std::unique_ptr<Model> reference = train(kRanks, options);
    options.shard = dsopt::shard::data;
    expect_same(*train(kRanks, options), *reference);
}

TEST(CppShard, StateIsThePartOfTheRank) {
    dsopt::optimizer_options options;
    options.shard = dsopt::shard::data;
    train(kRanks, options, [](int rank, dsopt::optimizer &opt) {
        std::int64_t sharded = 0;
        for (const dsopt::state_entry &entry : opt.state_list()) {
            EXPECT_EQ(entry.sharded(), entry.param() >= 0);
            if (!entry.sharded()) continue;
            const dsopt::shard_range part = opt.shard(entry.param());
            EXPECT_EQ(entry.numel(), part.numel);
            EXPECT_EQ(entry.dims(), std::vector<std::int64_t>{part.numel});
            EXPECT_EQ(entry.tensor().numel, part.numel);
            EXPECT_EQ(opt.shard(entry.param(), rank).numel, part.numel);
            ++sharded;
        }
        EXPECT_EQ(sharded, 6); // two moments of three parameters
    });
}

TEST(CppShard, PartsTileEveryParameter) {
    dsopt::optimizer_options options;
    options.shard = dsopt::shard::data;
    train(kRanks, options, [](int, const dsopt::optimizer &opt) {
        for (std::int64_t i = 0; i < 3; ++i) {
            std::int64_t end = 0;
            for (int r = 0; r < kRanks; ++r) {
                const dsopt::shard_range part = opt.shard(i, r);
                EXPECT_EQ(part.begin, part.numel == 0 ? 0 : end);
                EXPECT_EQ(part.begin % kBlock, 0);
                end += part.numel;
            }
            EXPECT_EQ(end, std::int64_t(kNumels[i]));
        }
        EXPECT_REFUSED(opt.shard(3), dsopt::argument_error, "param is 3");
        EXPECT_REFUSED(opt.shard(0, kRanks), dsopt::argument_error, "rank is 3");
    });
    Model model;
    dsopt::context ctx;
    dsopt::optimizer whole(ctx);
    EXPECT_REFUSED(whole.shard(0), dsopt::state_error, "");
    whole.add_group(rule(), model.params);
    EXPECT_EQ(whole.shard(2).begin, 0);
    EXPECT_EQ(whole.shard(2).numel, 4099);
    EXPECT_FALSE(whole.state(0).sharded());
}

TEST(CppShard, RejectsWhatCannotBeSharded) {
    dsopt::context ctx;
    dsopt::comm self = dsopt::comm::self(ctx), expert = dsopt::comm::self(ctx);
    dsopt::optimizer_options options;
    options.shard = dsopt::shard::data;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "SHARD has no effect without");
    options.data = &self;
    options.shard = dsopt::shard::node;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "SHARD_NODE has no effect without");
    options.shard = dsopt::shard::data;
    options.compat = dsopt::compat::deepspeed;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "SHARD is for standard mode");
    options.compat = dsopt::compat::none;
    options.experts = {&expert, 1};
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "experts do not go with SHARD");
    options.experts = {};
    dsopt::optimizer opt(ctx, options);
    EXPECT_REFUSED(opt.add_group(dsopt::onebit_adam{}), dsopt::unsupported_error, "the 1-bit family");
    EXPECT_REFUSED(opt.add_group(dsopt::zero_one_adam{}), dsopt::unsupported_error, "0/1 Adam is not sharded");
    Model model;
    opt.add_group(rule(), model.params);
    dsopt::step_options step;
    step.out = model.weights;
    EXPECT_REFUSED(opt.step(model.grads, step), dsopt::unsupported_error, "dsopt_step.out");
    opt.step(model.grads);
    for (dsopt::param &param : model.params) param.name += "2";
    EXPECT_REFUSED(opt.add_group(rule(), {model.params[0]}), dsopt::state_error, "before the first step");
}

TEST(CppAverages, NeedDtypeAndLengthOfAnAbsentGradient) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    on_ranks(2, [&](int rank) {
        Model model;
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        dsopt::optimizer_options options;
        options.averages = true;
        options.data = &comm;
        dsopt::optimizer opt(ctx, options);
        opt.add_group(rule(), model.params);
        model.grads[1] = dsopt::view(static_cast<float *>(nullptr), 0);
        EXPECT_REFUSED(opt.step(model.grads), dsopt::argument_error, "absent gradient of 'b'");
        model.grads[1] = {};
        EXPECT_REFUSED(opt.step(model.grads), dsopt::argument_error, "absent gradient of 'b'");
        expect_same(model, Model());
        model.grads[1] = dsopt::view(static_cast<float *>(nullptr), 7);
        opt.step(model.grads);
        EXPECT_EQ(opt.report().calls, 1);
    });
}

} // namespace shard_tests
