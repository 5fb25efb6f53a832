// SPDX-License-Identifier: Apache-2.0
// Norms in exactly the documented order, for numbers of leaves and of tensors on either side of what a lane, a row of
// lanes and one thread of a GPU add up.
#include "support/harness.h"
#include "support/lanes.h"

using namespace test;

namespace {

constexpr size_t kLeaf = 4096;
constexpr size_t kCounts[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65};

/// A number whose square changes the last bits of a sum according to where it is added.
float uneven(Random &random) { return float(random.uniform(1, 2) * std::exp2(random.uniform(-12, 12))); }

/// One number a leaf, zeros elsewhere: the sums of leaves are known without adding anything.
Array tensor_of(size_t leaves, Random &random) {
    std::vector<float> values(leaves * kLeaf);
    for (size_t leaf = 0; leaf < leaves; ++leaf)
        values[leaf * kLeaf + size_t(random.below(kLeaf / 2))] = uneven(random);
    if (leaves != 0) values.resize(values.size() - kLeaf / 2); // the last one is a part of one
    return {DSOPT_DTYPE_F32, values};
}
std::vector<Array> list_of_one_element_each(size_t tensors, Random &random) {
    std::vector<Array> list;
    for (size_t i = 0; i < tensors; ++i) list.emplace_back(DSOPT_DTYPE_F32, 1, uneven(random));
    return list;
}
/// One after the other, as it is not done.
double chained(const std::vector<Array> &list) {
    double sum = 0;
    for (const Array &array : list)
        for (const float x : array.floats()) sum += double(x) * double(x);
    return sum;
}

double norm_of(const Context &ctx, const std::vector<Array> &arrays) {
    const std::vector<dsopt_tensor> list = list_of(arrays);
    const Shared<dsopt_norm_result> result(1);
    must(dsopt_tensors_norm(ctx.get(), list.data(), int64_t(list.size()), DSOPT_NORM_L2, 0, nullptr, result.data(),
                            nullptr));
    return result->norm;
}

TEST(Sums, OfLeavesAreInTheOrderOfLanes) {
    const Context one = make_context(1, "generic"), three = make_context(3);
    for (const size_t leaves : kCounts)
        for (uint64_t seed = 0; seed < 3; ++seed) {
            Random random(100 * leaves + seed);
            const std::vector<Array> list{tensor_of(leaves, random)};
            const double wanted = std::sqrt(lanes::squares_of_list(list));
            EXPECT_EQ(norm_of(one, list), wanted) << leaves;
            EXPECT_EQ(norm_of(three, list), wanted) << leaves;
        }
}

TEST(Sums, OfTensorsAreInTheOrderOfLanes) {
    const Context one = make_context(1, "generic"), three = make_context(3);
    int differ = 0;
    for (const size_t tensors : kCounts)
        for (uint64_t seed = 0; seed < 20; ++seed) {
            Random random(100 * tensors + seed);
            const std::vector<Array> list = list_of_one_element_each(tensors, random);
            const double wanted = std::sqrt(lanes::squares_of_list(list));
            differ += wanted != std::sqrt(chained(list));
            EXPECT_EQ(norm_of(one, list), wanted) << tensors;
            EXPECT_EQ(norm_of(three, list), wanted) << tensors;
        }
    EXPECT_GT(differ, 20); // or this test says nothing about the order
}

/// Two groups by turns in the list. The report has the norms of all groups, and what group 0 was divided by.
TEST(Sums, OfGroupsCountTensorsByTheirPlaceInTheWholeList) {
    constexpr double kMaxNorm = 0.125; // a power of 2, so that the divisor is the norm but for its exponent
    const Context ctx = make_context(2);
    for (const size_t tensors : kCounts)
        for (uint64_t seed = 0; seed < 5; ++seed) {
            SCOPED_TRACE(tensors);
            Random random(100 * tensors + seed);
            const std::vector<Array> grads = list_of_one_element_each(tensors, random),
                                     weights = list_of_one_element_each(tensors, random);
            DSOPT_NEW(dsopt_optimizer_desc, desc);
            desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
            Trainer trainer(ctx, desc);
            dsopt_group group = group_of(DSOPT_ALGORITHM_ADAMW);
            group.max_norm = kMaxNorm;
            must(trainer.add_group(group, {}));
            must(trainer.add_group(group, {}));
            std::vector<dsopt_param> params(tensors);
            for (size_t i = 0; i < tensors; ++i) {
                params[i].tensor = weights[i].tensor();
                params[i].group = i % 3 == 1;
            }
            must(dsopt_optimizer_add_params(trainer.opt(), params.data(), int64_t(tensors)));
            std::vector<double> own, old, moved;
            const double before = std::sqrt(lanes::squares_of_list(weights));
            for (size_t i = 0; i < tensors; ++i) {
                own.push_back(i % 3 == 1 ? 0 : lanes::squares(grads[i]));
                old.push_back(weights[i][0]);
            }
            must(trainer.step(grads));
            const dsopt_report report = trainer.report();
            EXPECT_EQ(report.grad_norm, std::sqrt(lanes::squares_of_list(grads)));
            const double divisor = (std::sqrt(lanes::add(own)) + 1e-6) / kMaxNorm;
            EXPECT_EQ(report.divisor, std::max(1.0, divisor));
            EXPECT_EQ(report.weight_norm, before);
            for (size_t i = 0; i < tensors; ++i) {
                const float update = weights[i][0] - float(old[i]);
                moved.push_back(double(update) * double(update));
            }
            EXPECT_EQ(report.update_norm, std::sqrt(lanes::add(moved)));
        }
}

/// The ratio of a tensor's norms is what moves its weights: with every element at the same distance from 0, LAMB's
/// update is 1 for each element, so the ratio is the norm of the weights by the root of their number.
TEST(Sums, OfTrustRatiosAreInTheOrderOfLanes) {
    const Context ctx = make_context(2);
    for (const size_t leaves : kCounts) {
        if (leaves == 0) continue;
        Random random(leaves);
        Array weight = tensor_of(leaves, random);
        const double weights = lanes::squares(weight);
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        dsopt_group group = group_of(DSOPT_ALGORITHM_LAMB, 1e-2, 0);
        group.beta1 = group.beta2 = group.eps = 0;
        group.min_trust = 0;
        group.max_trust = 1e30;
        Trainer trainer(ctx, desc, group, std::vector<Array>{weight});
        must(trainer.step({Array(DSOPT_DTYPE_F32, weight.size(), 1.0f)}));
        const auto updates = double(weight.size()); // of ones
        EXPECT_EQ(trainer.first("trust_ratio", -1), float(std::sqrt(weights) / std::sqrt(updates))) << leaves;
    }
}

} // namespace
