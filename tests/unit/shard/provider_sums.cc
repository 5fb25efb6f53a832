// SPDX-License-Identifier: Apache-2.0
// DSOPT_COMM_FLAG_PROVIDER_SUMS: means whose sums a table's reduce_scatter adds up, in its own order.
#include "support/shard.h"
#include "support/thread_table.h"
#include <stdexcept>

using namespace test;

namespace shard_provider_sums_tests {

using BackwardTable = ThreadTable;

constexpr uint32_t kSums = DSOPT_COMM_FLAG_PROVIDER_SUMS;

/// Returns the comm of a rank, whose means the table adds up.
Comm summing_comm(ThreadTable &table, const Context &context, int rank) { return table.comm(context, rank, kSums); }

const ShardTraining kSgd{.groups = {group_of(DSOPT_ALGORITHM_SGD, 1, 0)}, .steps = 1};

struct Means {
    std::vector<std::vector<float>> values; // per tensor
    std::string weights;
};
/// Makes a step of SGD from zeros: the weights are the negative means.
Means means_of(Trainer &trainer, const std::vector<Array> &gradients) {
    Means means;
    for (Array &weight : trainer.weights()) {
        for (size_t i = 0; i < weight.size(); ++i) weight.set(i, 0);
    }
    must(trainer.step(gradients));
    for (Array &weight : trainer.weights()) {
        means.values.push_back(weight.floats());
        for (float &value : means.values.back()) value = -value;
        means.weights += weight.text();
    }
    return means;
}

/// Compares means with the exact ones: each addition and the division round once.
void expect_means(const Means &means, const ShardTraining &training, const Topology &topology) {
    const Context none;
    const Comm no_comm;
    std::vector<std::vector<double>> sums, bounds;
    for (int d = 0; d < topology.nodes; ++d)
        for (int l = 0; l < topology.per_node; ++l) {
            const std::vector<Array> list = own_gradients(training, 1, {l, d, none, no_comm, no_comm});
            sums.resize(list.size());
            bounds.resize(list.size());
            for (size_t t = 0; t < list.size(); ++t) {
                sums[t].resize(list[t].size());
                bounds[t].resize(list[t].size());
                if (list[t].tensor().data == nullptr) continue;
                for (size_t i = 0; i < list[t].size(); ++i) {
                    sums[t][i] += double(list[t][i]);
                    bounds[t][i] += std::fabs(double(list[t][i]));
                }
            }
        }
    for (size_t t = 0; t < sums.size(); ++t)
        for (size_t i = 0; i < sums[t].size(); ++i)
            ASSERT_LE(std::fabs(double(means.values[t][i]) - sums[t][i] / topology.ranks()),
                      bounds[t][i] * std::ldexp(1, -24))
                << "element " << i << " of tensor " << t;
}

TEST(ProviderSums, AreWithinRoundingAndTheSameOnAllRanks) {
    for (const int32_t dtype : kDtypes)
        for (const uint32_t flag : {uint32_t(DSOPT_OPTIMIZER_SHARD), 0u}) {
            ShardTraining training = kSgd;
            training.grad = dtype;
            training.absent = 4;
            const Topology topology{1, 3, flag};
            BackwardTable table(topology.ranks());
            std::vector<std::string> weights{size_t(topology.ranks())};
            run_ranks(topology.ranks(), [&](int rank) {
                const Context context = make_context(1);
                const Comm comm = summing_comm(table, context, rank), no_comm;
                Scaler scaler;
                dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES | flag);
                desc.data = comm.get();
                Trainer trainer = training.trainer(context, desc, scaler);
                const dsopt_comm_info before = info_of(comm);
                const Means means = means_of(trainer, own_gradients(training, 1, {0, rank, context, no_comm, comm}));
                weights[size_t(rank)] = means.weights;
                expect_means(means, training, topology);
                const dsopt_comm_info after = info_of(comm);
                const int64_t sent =
                    after.sent_of[DSOPT_COLLECTIVE_REDUCE_SCATTER] - before.sent_of[DSOPT_COLLECTIVE_REDUCE_SCATTER];
                EXPECT_EQ(after.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL], 0);
                EXPECT_EQ(after.calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], 1);
                EXPECT_EQ(sent, after.received_of[DSOPT_COLLECTIVE_REDUCE_SCATTER]);
                // Rows have padding to 64 bytes, and those of all ranks the same length.
                const ListVector vector(training.sizes);
                EXPECT_LE(sent, (topology.ranks() - 1) * vector.chunk(topology.ranks()) * int64_t(sizeof(float)));
                EXPECT_GT(sent,
                          (topology.ranks() - 1) * (vector.chunk(topology.ranks()) - 4096) * int64_t(sizeof(float)));
            });
            for (const std::string &of_rank : weights) EXPECT_TRUE(of_rank == weights[0]);
        }
}

/// With a node the first exchange is over its ranks, the second one over the nodes.
LABEL(long_emulated);
LABEL(slow);
TEST(ProviderSums, AreOfEitherLevel) {
    for (const Topology &topology : {Topology{2, 2}, Topology{3, 2, DSOPT_OPTIMIZER_SHARD_NODE}, Topology{2, 3, 0}})
        for (const int sums : {1, 2, 3}) {
            SCOPED_TRACE(topology.name() + ", sums of levels " + std::to_string(sums));
            ShardTraining training = kSgd;
            training.grad = DSOPT_DTYPE_BF16;
            std::vector<std::unique_ptr<BackwardTable>> in_node, between;
            for (int d = 0; d < topology.nodes; ++d)
                in_node.push_back(std::make_unique<BackwardTable>(topology.per_node));
            for (int l = 0; l < topology.per_node; ++l)
                between.push_back(std::make_unique<BackwardTable>(topology.nodes));
            std::vector<std::string> weights{size_t(topology.ranks())};
            run_ranks(topology.ranks(), [&](int rank) {
                const int l = rank % topology.per_node, d = rank / topology.per_node;
                const Context context = make_context(1);
                const Comm node = in_node[size_t(d)]->comm(context, l, (sums & 1) != 0 ? kSums : 0),
                           data = between[size_t(l)]->comm(context, d, (sums & 2) != 0 ? kSums : 0);
                Scaler scaler;
                dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES | topology.flag);
                desc.node = node.get();
                desc.data = data.get();
                Trainer trainer = training.trainer(context, desc, scaler);
                const Means means = means_of(trainer, own_gradients(training, 1, {l, d, context, node, data}));
                weights[size_t(rank)] = means.weights;
                expect_means(means, training, topology);
                EXPECT_EQ(info_of(node).calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], (sums & 1) != 0 ? 1 : 0);
                EXPECT_EQ(info_of(data).calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], (sums & 2) != 0 ? 1 : 0);
            });
            for (const std::string &of_rank : weights) EXPECT_TRUE(of_rank == weights[0]);
        }
}

TEST(ProviderSums, TrainWithTheSameWeightsOnAllRanks) {
    for (const uint32_t flag : {uint32_t(DSOPT_OPTIMIZER_SHARD), 0u}) {
        const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .scaled = true, .bad_step = 3};
        BackwardTable table(2);
        std::array<std::string, 2> weights;
        run_ranks(2, [&](int rank) {
            const Context context = make_context(1);
            const Comm comm = summing_comm(table, context, rank), no_comm;
            Scaler scaler;
            dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_AVERAGES | flag);
            desc.data = comm.get();
            Trainer trainer = training.trainer(context, desc, scaler);
            for (int64_t step = 1; step <= 5; ++step)
                must(trainer.step(own_gradients(training, step, {0, rank, context, no_comm, comm})));
            EXPECT_EQ(trainer.report().skipped, 1);
            weights[size_t(rank)] = trainer.model.text();
        });
        EXPECT_TRUE(weights[0] == weights[1]);
    }
}

TEST(ProviderSums, AreNotUsedByOneRank) {
    BackwardTable table(1);
    const Context context = make_context(1);
    const Comm comm = summing_comm(table, context, 0), no_comm;
    Scaler scaler;
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
    desc.data = comm.get();
    Trainer trainer = kSgd.trainer(context, desc, scaler);
    must(trainer.step(own_gradients(kSgd, 1, {0, 0, context, no_comm, comm})));
    EXPECT_EQ(info_of(comm).calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], 0);
}

// ----------------------------------------------------------------------------------------------------------- refusals
TEST(ProviderSumsRefusals, AreOfKindsWhoseOrderIsThatOfRanks) {
    const Context context = make_context(1);
    const CommId id = new_id();
    dsopt_comm *comm = nullptr;
    dsopt_comm_desc local = local_desc(id, 0, 1);
    local.flags = DSOPT_COMM_FLAG_PROVIDER_SUMS;
    EXPECT_TRUE(refused(dsopt_comm_create(context.get(), &local, &comm), DSOPT_ERR_UNSUPPORTED,
                        "PROVIDER_SUMS has no effect with kind 1"));
    DSOPT_NEW(dsopt_comm_desc, self);
    self.kind = DSOPT_COMM_KIND_SELF;
    self.flags = DSOPT_COMM_FLAG_PROVIDER_SUMS;
    EXPECT_TRUE(refused(dsopt_comm_create(context.get(), &self, &comm), DSOPT_ERR_UNSUPPORTED,
                        "PROVIDER_SUMS has no effect with kind 0"));
    EXPECT_EQ(comm, nullptr);
}

TEST(ProviderSumsRefusals, AreOfTablesWithoutReduceScatter) {
    const Context context = make_context(1);
    DSOPT_NEW(dsopt_comm_table, table);
    table.ranks = 2;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 1; };
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    desc.flags = DSOPT_COMM_FLAG_PROVIDER_SUMS;
    dsopt_comm *comm = nullptr;
    EXPECT_TRUE(refused(dsopt_comm_create(context.get(), &desc, &comm), DSOPT_ERR_UNSUPPORTED,
                        "dsopt_comm_table.reduce_scatter is NULL"));
    // A table of version 1 ends before reduce_scatter.
    table.size = offsetof(dsopt_comm_table, reduce_scatter);
    EXPECT_TRUE(refused(dsopt_comm_create(context.get(), &desc, &comm), DSOPT_ERR_UNSUPPORTED,
                        "dsopt_comm_table.reduce_scatter is NULL"));
    desc.flags = 0;
    EXPECT_OK(dsopt_comm_create(context.get(), &desc, &comm));
    dsopt_comm_destroy(comm);
}

// ----------------------------------------------------------------------------------------------------------- failures
/// Every rank's reduce_scatter fails.
class FailingTable final : public BackwardTable {
public:
    using Failure = int (*)();
    FailingTable(int ranks, Failure failure) : BackwardTable(ranks), failure_(failure) {}

protected:
    int reduce_scatter(int, const void *, void *, int64_t) override { return failure_(); }

private:
    const Failure failure_;
};

TEST(ProviderSumsFailures, LeaveEverythingAndMakeTheCommUnusable) {
    const std::pair<FailingTable::Failure, dsopt_status> cases[] = {
        {[]() -> int { throw std::runtime_error("thrown by reduce_scatter"); }, DSOPT_ERR_COMM},
        {[]() -> int { throw 7; }, DSOPT_ERR_COMM},
        {[] { return 77; }, DSOPT_ERR_COMM},
        {[] { return int(-DSOPT_ERR_TIMEOUT); }, DSOPT_ERR_TIMEOUT},
        {[] { return int(-DSOPT_ERR_ABORTED); }, DSOPT_ERR_ABORTED}};
    for (const auto &[failure, status] : cases)
        for (const uint32_t flag : {uint32_t(DSOPT_OPTIMIZER_SHARD), 0u}) {
            FailingTable table(2, failure);
            run_ranks(2, [&, failed = status](int rank) {
                const Context context = make_context(1);
                const Comm comm = summing_comm(table, context, rank), no_comm;
                Scaler scaler;
                dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_AVERAGES | flag);
                desc.data = comm.get();
                const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
                Trainer trainer = training.trainer(context, desc, scaler);
                const std::string before = trainer.text();
                const auto step = [&] {
                    return trainer.step(own_gradients(training, 1, {0, rank, context, no_comm, comm}));
                };
                EXPECT_TRUE(refused(step(), failed, "reduce-scatter"));
                EXPECT_EQ(info_of(comm).status, failed);
                EXPECT_TRUE(refused(step(), failed));
                EXPECT_TRUE(same(trainer.text(), before));
                EXPECT_EQ(info_of(comm).calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], 1);
                EXPECT_EQ(info_of(comm).sent_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], 0);
            });
        }
}

} // namespace shard_provider_sums_tests
