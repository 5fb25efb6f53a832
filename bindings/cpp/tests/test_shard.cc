// SPDX-License-Identifier: Apache-2.0
// Sharded state and averages, over ranks that are threads. Their bits are cases of bindings/conformance.
#include "model.h"

namespace shard_tests {

constexpr int kRanks = 3;
constexpr std::int64_t kBlock = 4096; // parts begin at multiples of it

/// Trains with sharded state, and calls `last(rank, optimizer)` at the end.
template <class Last> void train(dsopt::shard over, Last &&last) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    on_ranks(kRanks, [&](int rank) {
        Model model;
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, kRanks);
        dsopt::optimizer_options options;
        options.shard = over;
        (over == dsopt::shard::node ? options.node : options.data) = &comm;
        dsopt::optimizer opt(ctx, options);
        opt.add_group(rule(), model.params);
        opt.step(model.grads);
        last(rank, opt);
    });
}

TEST(CppShard, StateIsThePartOfTheRank) {
    for (const dsopt::shard over : {dsopt::shard::data, dsopt::shard::node}) {
        train(over, [](int rank, dsopt::optimizer &opt) {
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
}

TEST(CppShard, PartsTileEveryParameter) {
    train(dsopt::shard::data, [](int, const dsopt::optimizer &opt) {
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

TEST(CppReady, GivesTheBitsOfTheUndividedStep) {
    for (const bool early : {false, true}) {
        Model whole_model, model;
        dsopt::context ctx;
        dsopt::optimizer_options options;
        if (early)
            options.early_update = true;
        else
            options.max_norm = 0.5;
        dsopt::optimizer whole(ctx, options), opt(ctx, options);
        whole.add_group(rule(), whole_model.params);
        opt.add_group(rule(), model.params);
        for (int step = 0; step < 3; ++step) {
            whole.step(whole_model.grads);
            EXPECT_EQ(opt.ready(2, {&model.grads[2], 1}), early ? 2 : 3);
            const std::vector<std::int64_t> others = {1, 0};
            const std::vector<dsopt::tensor> grads = {model.grads[1], model.grads[0]};
            EXPECT_EQ(opt.ready(others, grads), early ? 0 : 3);
            opt.wait(0, 3);
            EXPECT_EQ(opt.bucket(1).first, 1);
            EXPECT_EQ(opt.bucket(1).count, early ? 1 : 0);
            opt.step_ready();
            expect_same(model, whole_model);
        }
        opt.ready(1, {&model.grads[1], 1});
        EXPECT_REFUSED(opt.step(model.grads), dsopt::state_error, "gradients are ready (parameter 'b')");
        EXPECT_REFUSED(opt.ready(1, {&model.grads[1], 1}), dsopt::argument_error, "already ready");
        opt.reset(dsopt::parts::ready);
        EXPECT_REFUSED(opt.ready(std::vector<std::int64_t>{1, 2}, {&model.grads[1], 1}), dsopt::argument_error,
                       "grads");
    }
}

TEST(CppReady, AveragesInBuckets) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    on_ranks(2, [&](int rank) {
        Model whole_model, model;
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        dsopt::optimizer_options options;
        options.averages = true;
        options.data = &comm;
        options.bucket = kBlock;
        options.buckets_in_flight = 1;
        dsopt::optimizer whole(ctx), opt(ctx, options);
        whole.add_group(rule(), whole_model.params);
        opt.add_group(rule(), model.params);
        whole.step(whole_model.grads);
        for (std::int64_t i = 3; i-- > 0;) EXPECT_EQ(opt.ready(i, {&model.grads[std::size_t(i)], 1}), i == 0 ? 0 : 3);
        dsopt::step_options end;
        end.ready = true;
        opt.step(std::vector<dsopt::tensor>(3), end);
        expect_same(model, whole_model); // both ranks have the same gradients
    });
}

} // namespace shard_tests
