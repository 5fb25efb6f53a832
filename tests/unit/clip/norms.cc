// SPDX-License-Identifier: Apache-2.0
// Functions on lists of tensors without an optimizer: norm and check for Inf and NaN, a x + b y, clamping.
#include "norm_recipe.h"
#include "support/harness.h"
#include "support/lanes.h"

using namespace test;

namespace clip_norms_tests {

constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};

/// Returns tensors with sizes around those of vectors, tiles, leaves and chunks.
std::vector<Array> mixed_list(Random &random) {
    std::vector<Array> list;
    for (const size_t size : {0, 1, 7, 8, 9, 31, 32, 33, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 50001}) {
        const double magnitude = std::exp2(random.uniform(-6, 6));
        list.emplace_back(kDtypes[list.size() % 3], random.floats(size, -magnitude, magnitude));
    }
    return list;
}
dsopt_norm_result norm_of(const Context &ctx, const std::vector<Array> &arrays, int32_t kind = DSOPT_NORM_L2,
                          double max_norm = 0, const Comm &comm = nullptr) {
    const std::vector<dsopt_tensor> list = list_of(arrays);
    const Shared<dsopt_norm_result> result(1);
    must(dsopt_tensors_norm(ctx.get(), list.data(), int64_t(list.size()), kind, max_norm, comm.get(), result.data(),
                            nullptr));
    return *result;
}
double norm_in_long_double(const std::vector<Array> &arrays) {
    long double sum = 0;
    for (const Array &array : arrays)
        for (const float x : array.floats()) sum += static_cast<long double>(x) * x;
    return double(std::sqrt(sum));
}
TEST(Norm, IsExactForMixedListsInTheDocumentedOrder) {
    const Context ctx = make_context(2);
    for (uint64_t seed = 0; seed < 5; ++seed) {
        Random random(seed);
        const std::vector<Array> list = mixed_list(random);
        const double norm = norm_of(ctx, list).norm;
        EXPECT_LE(std::fabs(norm - norm_in_long_double(list)), 1e-14 * norm);
        EXPECT_EQ(norm, std::sqrt(lanes::squares_of_list(list)));
        float largest = 0;
        for (const Array &array : list)
            for (const float x : array.floats()) largest = std::max(largest, std::fabs(x));
        EXPECT_EQ(norm_of(ctx, list, DSOPT_NORM_MAX).norm, double(largest));
    }
}

TEST(Norm, AddsEveryTailInTheDocumentedOrder) {
    // Magnitudes differ so much that the sum depends on the order.
    for (const char *isa : kIsas) {
        const Context ctx = make_context(1, isa);
        Random random(17);
        std::vector<size_t> sizes = {1023, 1024, 1025, 1151, 1152, 1153, 4095, 4096, 4097, 4096 + 129};
        for (size_t size = 1; size < 270; ++size) sizes.push_back(size);
        for (const size_t size : sizes)
            for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
                std::vector<float> values(size);
                for (float &value : values) value = float(random.uniform(1, 2) * std::exp2(random.uniform(-12, 12)));
                const std::vector<Array> list = {Array(dtype, values)};
                ASSERT_EQ(norm_of(ctx, list).norm, std::sqrt(lanes::squares_of_list(list)))
                    << isa << ", " << size << " of " << dtype_name(dtype);
            }
    }
}

TEST(Norm, HasTheSameBitsForAnyThreadCountAndInstructionSet) {
    Random random(11);
    std::vector<Array> list = mixed_list(random);
    list.emplace_back(DSOPT_DTYPE_BF16, random.floats(700001)); // enough elements for every thread
    list.emplace_back(DSOPT_DTYPE_F16, random.floats(500000));
    const dsopt_norm_result wanted = norm_of(make_context(1, "generic"), list, DSOPT_NORM_L2, 2);
    const dsopt_norm_result largest = norm_of(make_context(1, "generic"), list, DSOPT_NORM_MAX, 2);
    for (const char *isa : kIsas)
        for (const int threads : {1, 2, 3, 8}) {
            const Context ctx = make_context(threads, isa);
            for (const int32_t kind : {DSOPT_NORM_L2, DSOPT_NORM_MAX}) {
                const dsopt_norm_result got = norm_of(ctx, list, kind, 2);
                EXPECT_EQ(std::memcmp(&got, kind == DSOPT_NORM_L2 ? &wanted : &largest, sizeof got), 0)
                    << isa << ", " << threads;
            }
        }
}

TEST(Norm, CountsInfAndNanAndReportsTheFirstTensor) {
    for (const char *isa : kIsas)
        for (const int threads : {1, 3}) {
            const Context ctx = make_context(threads, isa);
            for (const int32_t dtype : kDtypes)
                for (const int32_t kind : {DSOPT_NORM_L2, DSOPT_NORM_MAX}) {
                    std::vector<Array> list = {Array(dtype, 5000, 1), Array(dtype, 0, 1), Array(dtype, 40000, 1),
                                               Array(dtype, 3, 1)};
                    EXPECT_EQ(norm_of(ctx, list, kind).first_bad, -1);
                    EXPECT_EQ(norm_of(ctx, list, kind).nonfinite, 0);
                    list[2].set(0, kInf);
                    list[2].set(4095, -kInf);
                    list[2].set(39999, kInf);
                    dsopt_norm_result result = norm_of(ctx, list, kind, 1);
                    EXPECT_EQ(result.nonfinite, 3);
                    EXPECT_EQ(result.first_bad, 2);
                    EXPECT_EQ(result.norm, double(kInf));
                    list[3].set(1, kNaN);
                    result = norm_of(ctx, list, kind, 1);
                    EXPECT_EQ(result.nonfinite, 4);
                    EXPECT_EQ(result.first_bad, 2);
                    EXPECT_TRUE(std::isnan(result.norm));
                    list[0] = Array(dtype, 5000, kNaN);
                    EXPECT_EQ(norm_of(ctx, list, kind).nonfinite, 5004);
                    EXPECT_EQ(norm_of(ctx, list, kind).first_bad, 0);
                }
        }
}

TEST(Norm, SetsTheCoefficientToClipOrToOneWithoutALimit) {
    const Context ctx = make_context(2);
    const std::vector<Array> list = {Array(DSOPT_DTYPE_F32, {3, 0}), Array(DSOPT_DTYPE_F16, {0, -4})};
    EXPECT_EQ(norm_of(ctx, list).norm, 5);
    EXPECT_EQ(norm_of(ctx, list, DSOPT_NORM_L2, 0).coefficient, 1);
    EXPECT_EQ(norm_of(ctx, list, DSOPT_NORM_L2, 5.1).coefficient, 1);
    EXPECT_EQ(norm_of(ctx, list, DSOPT_NORM_L2, 2).coefficient, float(2 / (5 + 1e-6)));
    EXPECT_EQ(norm_of(ctx, list, DSOPT_NORM_MAX, 2).coefficient, float(2 / (4 + 1e-6)));
    EXPECT_EQ(norm_of(ctx, {}, DSOPT_NORM_L2, 2).norm, 0);
    EXPECT_EQ(norm_of(ctx, {}, DSOPT_NORM_L2, 2).coefficient, 1);
}

TEST(Norm, IgnoresEntriesWithoutData) {
    const Context ctx = make_context(2);
    const std::vector<Array> list = {Array::absent(100000), Array(DSOPT_DTYPE_F32, {3, 4}),
                                     Array::absent(5, DSOPT_DTYPE_BF16), Array(DSOPT_DTYPE_F16, {kNaN})};
    EXPECT_EQ(norm_of(ctx, {list.begin(), list.begin() + 3}).norm, 5);
    EXPECT_EQ(norm_of(ctx, list).first_bad, 3);
}

TEST(Norm, NeitherOverflowsNorUnderflowsForFiniteElements) {
    const Context ctx = make_context(2);
    const float big = std::numeric_limits<float>::max(), tiny = std::numeric_limits<float>::denorm_min();
    EXPECT_NEAR(norm_of(ctx, {Array(DSOPT_DTYPE_F32, 10000, big)}).norm / double(big), 100, 1e-12);
    EXPECT_NEAR(norm_of(ctx, {Array(DSOPT_DTYPE_F32, 10000, tiny)}).norm / double(tiny), 100, 1e-12);
    EXPECT_DOUBLE_EQ(norm_of(ctx, {Array(DSOPT_DTYPE_F16, 4, 0x1p-24f)}).norm, 0x1p-23);
    EXPECT_EQ(norm_of(ctx, {Array(DSOPT_DTYPE_F32, 10000, tiny)}, DSOPT_NORM_MAX).norm, double(tiny));
}

TEST(Norm, AddsRanksOfACommAndReportsFirstBadLocally) {
    for (const int ranks : {2, 3}) {
        const CommId id = new_id();
        std::vector<std::vector<Array>> parts;
        std::vector<Array> all;
        Random random(12);
        for (int rank = 0; rank < ranks; ++rank) {
            parts.push_back({Array(DSOPT_DTYPE_F16, random.floats(size_t(rank) * 3000)),
                             Array(DSOPT_DTYPE_F32, random.floats(100))});
            all.insert(all.end(), parts.back().begin(), parts.back().end());
        }
        const double wanted = norm_in_long_double(all);
        std::vector<double> norms(size_t(ranks), 0.0);
        run_ranks(ranks, [&](int rank) {
            const Context ctx = make_context(2);
            const Comm comm = local_comm(ctx, id, rank, ranks);
            std::vector<Array> &mine = parts[size_t(rank)];
            dsopt_norm_result result = norm_of(ctx, mine, DSOPT_NORM_L2, 0.5, comm);
            norms[size_t(rank)] = result.norm;
            EXPECT_LE(std::fabs(result.norm - wanted), 1e-14 * wanted);
            EXPECT_EQ(result.coefficient, float(0.5 / (result.norm + 1e-6)));
            EXPECT_EQ(result.nonfinite, 0);
            mine[1].set(5, float(2 + rank));
            EXPECT_EQ(norm_of(ctx, mine, DSOPT_NORM_MAX, 0, comm).norm, 1 + ranks);
            mine[1].set(7, rank == 1 ? -kInf : 0.0f);
            result = norm_of(ctx, mine, DSOPT_NORM_MAX, 0, comm);
            EXPECT_EQ(result.norm, double(kInf));
            EXPECT_EQ(result.nonfinite, 1);
            EXPECT_EQ(result.first_bad, rank == 1 ? 1 : -1);
            for (int bad = 0; bad < ranks; ++bad) { // a NaN on any rank
                mine[1].set(7, rank == bad ? kNaN : 0.0f);
                EXPECT_TRUE(std::isnan(norm_of(ctx, mine, DSOPT_NORM_L2, 0, comm).norm))
                    << "rank " << rank << ", bad " << bad;
                EXPECT_TRUE(std::isnan(norm_of(ctx, mine, DSOPT_NORM_MAX, 0, comm).norm))
                    << "rank " << rank << ", bad " << bad;
            }
        });
        for (const double norm : norms) EXPECT_EQ(norm, norms[0]) << "bits differ between ranks";
    }
}

TEST(Norm, RefusesBadListsAndKeepsTheResult) {
    const Context ctx = make_context(2);
    Array array(DSOPT_DTYPE_F32, 4, 1);
    const dsopt_tensor good = array.tensor();
    const Shared<dsopt_norm_result> result(1);
    *result = {.norm = 77, .coefficient = 7, .reserved = 0, .nonfinite = 7, .first_bad = 7};
    const auto call = [&](const dsopt_tensor *list, int64_t count, int32_t kind = DSOPT_NORM_L2, double max_norm = 0) {
        return dsopt_tensors_norm(ctx.get(), list, count, kind, max_norm, nullptr, result.data(), nullptr);
    };
    dsopt_tensor bad[2] = {good, good};
    bad[1].dtype = DSOPT_DTYPE_I32;
    EXPECT_TRUE(refused(call(bad, 2), DSOPT_ERR_DTYPE, "'1'"));
    bad[1] = good;
    bad[1].numel = -1;
    EXPECT_TRUE(refused(call(bad, 2), DSOPT_ERR_SHAPE, "'1'"));
    bad[1].numel = INT64_MAX;
    EXPECT_TRUE(refused(call(bad, 2), DSOPT_ERR_SHAPE, "'1'"));
    bad[1] = good;
    bad[1].data = static_cast<char *>(good.data) + 2;
    EXPECT_TRUE(refused(call(bad, 2), DSOPT_ERR_ALIGNMENT, "'1'"));
    EXPECT_TRUE(refused(call(&good, -1), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(call(nullptr, 1), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(call(&good, 1, 2), DSOPT_ERR_ARGUMENT, "norm"));
    EXPECT_TRUE(refused(call(&good, 1, 0, -1), DSOPT_ERR_ARGUMENT, "max_norm"));
    EXPECT_TRUE(refused(call(&good, 1, 0, double(kNaN)), DSOPT_ERR_ARGUMENT, "max_norm"));
    EXPECT_TRUE(refused(dsopt_tensors_norm(ctx.get(), &good, 1, 0, 0, nullptr, nullptr, nullptr), DSOPT_ERR_ARGUMENT,
                        "result"));
    EXPECT_TRUE(refused(dsopt_tensors_norm(nullptr, &good, 1, 0, 0, nullptr, result.data(), nullptr),
                        DSOPT_ERR_ARGUMENT, "ctx"));
    EXPECT_EQ(result->norm, 77);
    EXPECT_EQ(result->first_bad, 7);
    EXPECT_OK(call(nullptr, 0));
}

// ----------------------------------------------------------------------------------------------------------- a x + b y
const std::vector<float> kSpecial = {0.0f,      -0.0f,      1,        -1,     kInf,       -kInf,     kNaN,
                                     65504,     65519.996f, 65520,    1e-8f,  -6e-8f,     0x1p-24f,  0x1p-25f,
                                     0x1p-133f, 0x1p-149f,  3.38e38f, -3e38f, 1.0009766f, 1.0004883f};

TEST(Axpby, RoundsOnceIntoEveryPairOfDtypes) {
    Random random(13);
    std::vector<float> values = random.floats(9000, -100, 100), others = random.floats(9000, -100, 100);
    for (size_t i = 0; i < kSpecial.size(); ++i)
        for (size_t k = 0; k < kSpecial.size(); ++k)
            values[i * 20 + k + 500] = kSpecial[i], others[i * 20 + k + 500] = kSpecial[k];
    const float scale = 0.3f;
    for (const char *isa : kIsas) {
        const Context ctx = make_context(3, isa);
        for (const int32_t from : kDtypes)
            for (const int32_t to : kDtypes)
                for (const float *a : {static_cast<const float *>(nullptr), &scale})
                    for (const float b : {0.0f, 1.0f, -0.7f}) {
                        const Array x(from, values);
                        Array y(to, b == 0 ? std::vector<float>(values.size(), kNaN) : others);
                        std::vector<float> wanted(values.size());
                        for (size_t i = 0; i < wanted.size(); ++i) {
                            const volatile float left = (a != nullptr ? *a : 1.0f) * x[i], right = b * y[i];
                            wanted[i] = rounded(b == 0 ? left : left + right, to);
                        }
                        const dsopt_tensor source = x.tensor(), target = y.tensor();
                        ASSERT_OK(dsopt_tensors_axpby(ctx.get(), a, &source, b, &target, 1, nullptr));
                        ASSERT_TRUE(same_bits(y.floats(), wanted))
                            << isa << ", " << dtype_name(from) << " to " << dtype_name(to) << ", b " << b;
                    }
    }
}

TEST(Axpby, WorksInPlaceAndOnWholeLists) {
    const Context ctx = make_context(2);
    Random random(14);
    std::vector<Array> list = mixed_list(random);
    std::vector<std::vector<float>> wanted;
    for (const Array &array : list) {
        wanted.push_back(array.floats());
        for (float &value : wanted.back()) value = rounded(0.125f * value, array.dtype());
    }
    list.push_back(Array::absent(3));
    const float a = 0.125f;
    const std::vector<dsopt_tensor> tensors = list_of(list);
    ASSERT_OK(dsopt_tensors_axpby(ctx.get(), &a, tensors.data(), 0, tensors.data(), int64_t(tensors.size()), nullptr));
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(same_bits(list[i].floats(), wanted[i])) << i;
    EXPECT_EQ(list.back()[0], 0);
}

TEST(Axpby, HasTheSameBitsForAnyThreadCountAndInstructionSet) {
    Random random(16);
    const std::vector<Array> x = {Array(DSOPT_DTYPE_F32, random.floats(300001)),
                                  Array(DSOPT_DTYPE_F16, random.floats(70000))};
    const std::vector<Array> y = {Array(DSOPT_DTYPE_BF16, random.floats(300001)),
                                  Array(DSOPT_DTYPE_F32, random.floats(70000))};
    const float a = 0.7f;
    std::string wanted;
    for (const char *isa : kIsas)
        for (const int threads : {1, 2, 3, 8}) {
            const std::vector<Array> result = y;
            const std::vector<dsopt_tensor> from = list_of(x), to = list_of(result);
            const Context ctx = make_context(threads, isa);
            ASSERT_OK(dsopt_tensors_axpby(ctx.get(), &a, from.data(), 0.3f, to.data(), 2, nullptr));
            ASSERT_OK(dsopt_tensors_clamp(ctx.get(), to.data(), 2, 0.5, nullptr));
            const std::string got = result[0].text() + result[1].text();
            if (wanted.empty()) wanted = got;
            EXPECT_TRUE(got == wanted) << isa << ", " << threads << " threads";
        }
}

TEST(Axpby, IgnoresEntriesWithoutDataOnEitherSide) {
    const Context ctx = make_context(2);
    const std::vector<Array> x = {Array::absent(2), Array(DSOPT_DTYPE_F32, 2, 1), Array(DSOPT_DTYPE_F32, 2, 5)};
    const std::vector<Array> y = {Array(DSOPT_DTYPE_F16, 2, 7), Array::absent(2, DSOPT_DTYPE_F16),
                                  Array(DSOPT_DTYPE_F16, 2, 7)};
    const std::vector<dsopt_tensor> from = list_of(x), to = list_of(y);
    ASSERT_OK(dsopt_tensors_axpby(ctx.get(), nullptr, from.data(), 1, to.data(), 3, nullptr));
    EXPECT_EQ(y[0][0], 7);
    EXPECT_EQ(y[1][0], 0);
    EXPECT_EQ(y[2][1], 12);
}

TEST(Axpby, RefusesListsThatDoNotMatch) {
    const Context ctx = make_context(2);
    const Array a(DSOPT_DTYPE_F32, 4, 1), b(DSOPT_DTYPE_F32, 3, 1);
    const dsopt_tensor x = a.tensor(), y = b.tensor();
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, &x, 0, &y, 1, nullptr), DSOPT_ERR_SHAPE));
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, nullptr, 0, &y, 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, &x, 0, nullptr, 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, &x, 0, &x, -1, nullptr), DSOPT_ERR_ARGUMENT));
    dsopt_tensor integers = x;
    integers.dtype = DSOPT_DTYPE_I32;
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, &integers, 0, &x, 1, nullptr), DSOPT_ERR_DTYPE));
    EXPECT_TRUE(refused(dsopt_tensors_axpby(ctx.get(), nullptr, &x, 0, &integers, 1, nullptr), DSOPT_ERR_DTYPE));
    EXPECT_TRUE(same_bits(a.floats(), {1, 1, 1, 1}));
}

// --------------------------------------------------------------------------------------------------------------- clamp
TEST(Clamp, ClampsEveryElementAndKeepsNan) {
    Random random(15);
    std::vector<float> values = random.floats(9000, -4, 4);
    std::copy(kSpecial.begin(), kSpecial.end(), values.begin() + 100);
    for (const char *isa : kIsas) {
        const Context ctx = make_context(3, isa);
        for (const int32_t dtype : kDtypes)
            for (const double limit : {0.3, 1.0, 1e6}) {
                const Array x(dtype, values);
                std::vector<float> wanted = x.floats();
                for (float &value : wanted)
                    if (!std::isnan(value)) value = rounded(std::clamp(value, -float(limit), float(limit)), dtype);
                const dsopt_tensor tensor = x.tensor();
                ASSERT_OK(dsopt_tensors_clamp(ctx.get(), &tensor, 1, limit, nullptr));
                EXPECT_TRUE(same_bits(x.floats(), wanted)) << isa << ", " << dtype_name(dtype) << ", " << limit;
            }
    }
}

TEST(Clamp, RefusesLimitsThatAreNotPositive) {
    const Context ctx = make_context(2);
    const Array x(DSOPT_DTYPE_F32, 3, 9);
    const dsopt_tensor tensor = x.tensor();
    for (const double limit : {0.0, -1.0, double(kNaN)})
        EXPECT_TRUE(refused(dsopt_tensors_clamp(ctx.get(), &tensor, 1, limit, nullptr), DSOPT_ERR_ARGUMENT, "limit"));
    EXPECT_TRUE(refused(dsopt_tensors_clamp(ctx.get(), nullptr, 1, 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_EQ(x[0], 9);
    EXPECT_OK(dsopt_tensors_clamp(ctx.get(), &tensor, 1, HUGE_VAL, nullptr));
    EXPECT_EQ(x[0], 9);
}

/// Two expert ranks of two model ranks each: the norms that norm_over_ranks (dsopt.h) and a step compute on each rank.
struct RankGrid {
    static constexpr int kTensors = 5;
    static constexpr int32_t kFlags[kTensors] = {0, DSOPT_PARAM_MODEL_PARALLEL, DSOPT_PARAM_REPLICATED, 0,
                                                 DSOPT_PARAM_MODEL_PARALLEL};
    CommId models[2] = {new_id(), new_id()}, experts[2] = {new_id(), new_id()};
    double recipe[4] = {}, report[4] = {}, expert_norm[4] = {};

    /// `bad`: index of the tensor that contains a NaN on rank `bad_rank`; -1 = none.
    explicit RankGrid(int bad = -1, int bad_rank = 3) {
        run_ranks(4, [&](int rank) {
            const int m = rank % 2, e = rank / 2;
            const Context context = make_context(1);
            const Comm model = make_comm(context, local_desc(models[e], m, 2)),
                       expert = make_comm(context, local_desc(experts[m], e, 2));
            // Tensors: replicated on all ranks; sharded over model ranks; counted by another pipeline stage; experts;
            // experts that are sharded over model ranks.
            const float values[kTensors] = {2, float(3 + m), 100, float(5 + e), float(7 + rank)};
            std::vector<Array> weights, gradients;
            std::vector<dsopt_param> params;
            for (int i = 0; i < kTensors; ++i) {
                weights.emplace_back(DSOPT_DTYPE_F32, 4, 1);
                gradients.emplace_back(DSOPT_DTYPE_F32, 4, rank == bad_rank && i == bad ? NAN : values[i]);
            }
            for (int i = 0; i < kTensors; ++i) {
                dsopt_param param{};
                param.tensor = weights[size_t(i)].tensor();
                param.flags = kFlags[i];
                param.expert = i >= 3;
                params.push_back(param);
            }
            std::vector<dsopt_tensor> list = list_of(gradients), part(kTensors);
            dsopt_comm *const comms[1] = {expert.get()};
            must(norm_over_ranks(context.get(), params.data(), list.data(), part.data(), kTensors, model.get(), m,
                                 comms, 1, &recipe[rank]));
            dsopt_optimizer_desc desc = optimizer_desc();
            desc.model = model.get();
            desc.experts = comms;
            desc.expert_count = 1;
            desc.nonfinite = DSOPT_NONFINITE_SKIP;
            const Optimizer opt = make_optimizer(context, desc);
            const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
            must(dsopt_optimizer_add_group(opt.get(), &group, params.data(), kTensors));
            DSOPT_NEW(dsopt_step, step);
            step.grads = list.data();
            step.count = kTensors;
            must(dsopt_optimizer_step(opt.get(), &step));
            report[rank] = report_of(opt.get()).grad_norm;
            expert_norm[rank] = report_of(opt.get()).expert_norm;
        });
    }
};

constexpr double kDenseSquares = 4.0 * (2 * 2 + 3 * 3 + 4 * 4),
                 kExpertSquares = 4.0 * (5 * 5 + 6 * 6 + 7 * 7 + 8 * 8 + 9 * 9 + 10 * 10);

TEST(NormOverRanks, EqualsTheNormOfAStepForAllKindsOfTensors) {
    const RankGrid grid;
    for (int rank = 0; rank < 4; ++rank) {
        const double norm = std::sqrt(kDenseSquares + kExpertSquares);
        EXPECT_EQ(grid.report[rank], norm) << rank;
        EXPECT_NEAR(grid.recipe[rank], norm, 1e-7 * norm) << rank;
        EXPECT_EQ(grid.recipe[rank], grid.recipe[0]) << rank;
        EXPECT_EQ(grid.expert_norm[rank], std::sqrt(kExpertSquares))
            << "expert_norm is not the root of the sum of squares over all ranks";
    }
}

TEST(NormOverRanks, IsMinusOneOnRanksThatShareANonFiniteTensor) {
    const double finite = RankGrid().recipe[0];
    const RankGrid shard(1), expert(3, 2), expert_shard(4);
    EXPECT_EQ(shard.recipe[0], finite) << "the NaN is in another model comm";
    EXPECT_EQ(shard.recipe[2], -1);
    EXPECT_EQ(shard.recipe[3], -1);
    for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(expert.recipe[rank], -1) << rank;
        EXPECT_EQ(expert_shard.recipe[rank], -1) << rank;
        EXPECT_TRUE(std::isnan(expert_shard.report[rank])) << rank;
    }
    EXPECT_EQ(RankGrid(2).recipe[3], finite) << "another stage counts the tensor";
}

} // namespace clip_norms_tests
