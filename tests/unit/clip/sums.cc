// SPDX-License-Identifier: Apache-2.0
// Norms are added in exactly the documented order, for numbers of leaves and of tensors around the boundaries of a
// lane, a row of lanes and one thread of a GPU.
#include "support/harness.h"
#include "support/lanes.h"

using namespace test;

namespace clip_sums_tests {

constexpr size_t kLeaf = 4096;
constexpr size_t kCounts[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65};

/// Returns a number of random magnitude: the last bits of a sum of squares depend on the order of addition.
float random_magnitude(Random &random) { return float(random.uniform(1, 2) * std::exp2(random.uniform(-12, 12))); }

/// Returns a tensor with one nonzero element per leaf, so that the sum of a leaf has no rounding error.
Array tensor_of(size_t leaves, Random &random) {
    std::vector<float> values(leaves * kLeaf);
    for (size_t leaf = 0; leaf < leaves; ++leaf)
        values[leaf * kLeaf + size_t(random.below(kLeaf / 2))] = random_magnitude(random);
    if (leaves != 0) values.resize(values.size() - kLeaf / 2); // the last leaf is not full
    return {DSOPT_DTYPE_F32, values};
}
std::vector<Array> list_of_one_element_each(size_t tensors, Random &random) {
    std::vector<Array> list;
    for (size_t i = 0; i < tensors; ++i) list.emplace_back(DSOPT_DTYPE_F32, 1, random_magnitude(random));
    return list;
}
/// Returns the sum of squares in list order, which is not the documented order.
double sum_in_list_order(const std::vector<Array> &list) {
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

TEST(NormOrder, AddsLeavesInTheOrderOfLanes) {
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

TEST(NormOrder, AddsTensorsInTheOrderOfLanes) {
    const Context one = make_context(1, "generic"), three = make_context(3);
    int differ = 0;
    for (const size_t tensors : kCounts)
        for (uint64_t seed = 0; seed < 20; ++seed) {
            Random random(100 * tensors + seed);
            const std::vector<Array> list = list_of_one_element_each(tensors, random);
            const double wanted = std::sqrt(lanes::squares_of_list(list));
            differ += wanted != std::sqrt(sum_in_list_order(list));
            EXPECT_EQ(norm_of(one, list), wanted) << tensors;
            EXPECT_EQ(norm_of(three, list), wanted) << tensors;
        }
    EXPECT_GT(differ, 20); // otherwise this test does not depend on the order
}

// Parameters of two groups alternate. The report contains the norms of all groups and the divisor of group 0.
TEST(NormOrder, AddsGroupsByIndexInTheWholeList) {
    constexpr double kMaxNorm = 0.125; // a power of 2: the division is exact
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
            std::vector<double> squares_of_group, old, squares_of_updates;
            const double before = std::sqrt(lanes::squares_of_list(weights));
            for (size_t i = 0; i < tensors; ++i) {
                squares_of_group.push_back(i % 3 == 1 ? 0 : lanes::squares(grads[i]));
                old.push_back(weights[i][0]);
            }
            must(trainer.step(grads));
            const dsopt_report report = trainer.report();
            EXPECT_EQ(report.grad_norm, std::sqrt(lanes::squares_of_list(grads)));
            const double divisor = (std::sqrt(lanes::add(squares_of_group)) + 1e-6) / kMaxNorm;
            EXPECT_EQ(report.divisor, std::max(1.0, divisor));
            EXPECT_EQ(report.weight_norm, before);
            for (size_t i = 0; i < tensors; ++i) {
                const float update = weights[i][0] - float(old[i]);
                squares_of_updates.push_back(double(update) * double(update));
            }
            EXPECT_EQ(report.update_norm, std::sqrt(lanes::add(squares_of_updates)));
        }
}

// Betas and eps are 0 and gradients are 1, so LAMB's update is 1 for each element. The trust ratio is then the norm of
// the weights divided by the square root of their number.
TEST(NormOrder, AddsTrustRatioNormsInTheOrderOfLanes) {
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
        const auto updates = double(weight.size()); // sum of the squares of the updates
        EXPECT_EQ(trainer.first("trust_ratio", -1), float(std::sqrt(weights) / std::sqrt(updates))) << leaves;
    }
}

} // namespace clip_sums_tests
