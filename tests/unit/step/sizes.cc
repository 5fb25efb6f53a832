// SPDX-License-Identifier: Apache-2.0
// Sizes at every boundary of the implementation, addresses that are not aligned to cache lines, long lists, empty
// tensors and mixed dtypes.
#include "support/harness.h"

using namespace test;

namespace step_sizes_tests {

// Below, at and above: a vector, two vectors, the lanes of a sum, a tile, a leaf (smallest chunk), the largest chunk.
const std::vector<int64_t> kSizes = {0,    1,    2,    3,    7,    8,     9,     15,    16,    17,
                                     31,   32,   33,   63,   64,   65,    1023,  1024,  1025,  4095,
                                     4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537, 100003};

// Element i of a tensor has the same bits at any length and any address of the tensor: those in one long tensor.
struct Type {
    int32_t algorithm, param, grad;
};
class StepLayout : public testing::TestWithParam<Type> {};

void expect_prefix(const Trainer &whole, const Trainer &part, size_t i, int64_t numel) {
    ASSERT_TRUE(same(part.model.params[i].text(), whole.model.params[0].text().substr(0, part.model.params[i].bytes())))
        << numel;
    for (const dsopt_state_info &info : whole.state()) {
        if (info.param != 0) continue;
        std::vector<float> head = exported(whole.opt(), 0, info.name);
        head.resize(size_t(numel));
        ASSERT_EQ(exported(part.opt(), int64_t(i), info.name), head) << info.name << " of " << numel;
    }
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST_P(StepLayout, GivesTheSameBitsAtEveryLength) {
    const auto [algorithm, param, grad] = GetParam();
    const Trainer whole({{100003, param, grad, 0, 0}}, make_group(algorithm));
    whole.train(1, 2);
    std::vector<Shape> shapes;
    for (const int64_t numel : kSizes) shapes.push_back({numel, param, grad, 0, 0});
    const Trainer parts(shapes, make_group(algorithm));
    parts.train(1, 2);
    for (size_t i = 0; i < kSizes.size(); ++i) expect_prefix(whole, parts, i, kSizes[i]);
    EXPECT_TRUE(parts.model.intact());
}

TEST_P(StepLayout, GivesTheSameBitsAtAnyElementAlignedAddress) {
    const auto [algorithm, param, grad] = GetParam();
    const Trainer whole({{5000, param, grad, 0, 0}}, make_group(algorithm));
    whole.train(1, 2);
    std::vector<Shape> shapes;
    const size_t element = std::max(size_of(param), size_of(grad));
    for (size_t offset = element; offset < 64; offset += element)
        for (const int64_t numel : {int64_t(1), int64_t(15), int64_t(1025), int64_t(4999)})
            shapes.push_back({numel, param, grad, offset, 0});
    const Trainer parts(shapes, make_group(algorithm));
    parts.train(1, 2);
    for (size_t i = 0; i < shapes.size(); ++i) expect_prefix(whole, parts, i, shapes[i].numel);
    EXPECT_TRUE(parts.model.intact());
}

std::vector<Type> types() {
    std::vector<Type> list;
    for (const int32_t algorithm : kElementWise) list.push_back({algorithm, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32});
    for (const int32_t param : kDtypes)
        for (const int32_t grad : kDtypes)
            if (param != DSOPT_DTYPE_F32 || grad != DSOPT_DTYPE_F32)
                list.push_back({DSOPT_ALGORITHM_ADAMW, param, grad});
    return list;
}
std::string type_name(const testing::TestParamInfo<Type> &info) {
    return name_of(info.param.algorithm) + dtype_name(info.param.param) + "Grad" + dtype_name(info.param.grad);
}
INSTANTIATE_TEST_SUITE_P(Types, StepLayout, testing::ValuesIn(types()), type_name);

// The norms of LAMB depend on the length of a tensor, so only the address changes here.
TEST(LambLayout, GivesTheSameBitsAtAnyElementAlignedAddress) {
    for (const int32_t grad : kDtypes)
        for (const size_t offset : {size_t(2), size_t(4), size_t(6), size_t(28), size_t(62)}) {
            if (offset % size_of(grad) != 0) continue;
            std::vector<Shape> aligned, shifted;
            for (const int64_t numel : {1, 31, 1025, 4097, 10001}) {
                aligned.push_back({numel, DSOPT_DTYPE_BF16, grad});
                shifted.push_back({numel, DSOPT_DTYPE_BF16, grad, offset});
            }
            const Trainer a(aligned, make_group(DSOPT_ALGORITHM_LAMB)), b(shifted, make_group(DSOPT_ALGORITHM_LAMB));
            a.train(1, 3);
            b.train(1, 3);
            EXPECT_TRUE(same(a.text(), b.text())) << offset;
        }
}

// Expects that each tensor of a list has the same bits as in an optimizer with this tensor alone.
void expect_as_alone(const Trainer &list, const std::vector<Shape> &shapes, const dsopt_group &group,
                     size_t stride = 1) {
    for (size_t i = 0; i < shapes.size(); i += stride) {
        Shape alone = shapes[i];
        alone.content = int64_t(i);
        const Trainer trainer({alone}, group);
        trainer.train(1, 2);
        ASSERT_TRUE(same(trainer.model.text(), list.model.params[i].text())) << i;
        ASSERT_EQ(exported(trainer.opt(), 0, "exp_avg_sq"), exported(list.opt(), int64_t(i), "exp_avg_sq")) << i;
    }
}

class StepLists : public testing::TestWithParam<int32_t> {};

TEST_P(StepLists, AcceptEmptyTensorsAnywhere) {
    const std::vector<std::vector<int64_t>> lists = {{0},       {0, 0, 0},  {0, 5},    {5, 0}, {0, 4096, 0, 0, 4097, 0},
                                                     {3, 0, 3}, {70000, 0}, {0, 70000}};
    for (const auto &sizes : lists) {
        const std::vector<Shape> shapes = shapes_of(sizes);
        const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS),
                              context_desc(3));
        trainer.train(1, 2);
        expect_as_alone(trainer, shapes, make_group(GetParam()));
        EXPECT_TRUE(trainer.model.intact());
    }
}

TEST_P(StepLists, AcceptEmptyTensorsWithoutMemory) {
    Trainer trainer(shapes_of({4, 4}), optimizer_desc(1.0));
    auto list = trainer.model.registered();
    list.insert(list.begin() + 1, param_of({nullptr, 0, DSOPT_DTYPE_BF16, 0}, "empty"));
    const dsopt_group group = make_group(GetParam());
    ASSERT_OK(dsopt_optimizer_add_group(trainer.opt(), &group, list.data(), 3));
    trainer.grads.insert(trainer.grads.begin() + 1, dsopt_tensor{nullptr, 0, DSOPT_DTYPE_F32, 0});
    DSOPT_NEW(dsopt_step, step);
    step.grads = trainer.grads.data();
    step.count = 3;
    ASSERT_OK(trainer.step(step));
    std::vector<dsopt_tensor> out = list_of(trainer.model.params);
    out.insert(out.begin() + 1, dsopt_tensor{nullptr, 0, DSOPT_DTYPE_F32, 0});
    step.out = out.data();
    step.flags = DSOPT_STEP_OUT_ONLY;
    EXPECT_OK(trainer.step(step));
}

TEST_P(StepLists, UpdateFortyTensors) {
    std::vector<Shape> shapes;
    for (int i = 0; i < 40; ++i) shapes.push_back({i == 35 ? 0 : 37 * i + 1});
    const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(), context_desc(2));
    trainer.train(1, 2);
    expect_as_alone(trainer, shapes, make_group(GetParam()));
}

LABEL(long_emulated);
TEST_P(StepLists, UpdateFiveThousandTensors) {
    std::vector<Shape> shapes;
    for (int i = 0; i < 5000; ++i)
        shapes.push_back({i % 50 == 7 ? 0 : i % 97 + 1, i % 3 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_BF16,
                          i % 2 ? DSOPT_DTYPE_F16 : DSOPT_DTYPE_F32});
    const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS),
                          context_desc(3));
    trainer.train(1, 2);
    expect_as_alone(trainer, shapes, make_group(GetParam()), 61);
    EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>(5000, 2));
    EXPECT_TRUE(trainer.model.intact());
}

TEST_P(StepLists, UpdateAllDtypesInOneList) {
    std::vector<Shape> shapes;
    for (const int32_t param : kDtypes)
        for (const int32_t grad : kDtypes)
            for (const int64_t numel : {3000, 1, 0, 4097}) shapes.push_back({numel, param, grad});
    for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_NO_MASTER)}) {
        const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0, flags), context_desc(2));
        trainer.train(1, 2);
        for (size_t i = 0; i < shapes.size(); ++i) {
            Shape alone = shapes[i];
            alone.content = int64_t(i);
            const bool halves = alone.param != DSOPT_DTYPE_F32;
            const Trainer single({alone}, make_group(GetParam()), optimizer_desc(0, halves ? flags : 0));
            single.train(1, 2);
            ASSERT_TRUE(same(single.model.text(), trainer.model.params[i].text())) << i;
        }
        EXPECT_TRUE(trainer.model.intact());
    }
}

INSTANTIATE_TEST_SUITE_P(Algorithms, StepLists, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST(StepGroups, MayHaveNoParameters) {
    Trainer trainer(shapes_of({100, 100}), optimizer_desc(1.0, DSOPT_OPTIMIZER_REPORT_NORMS));
    trainer.add(make_group(DSOPT_ALGORITHM_LAMB), 0);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAM), 0);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAM_LEGACY), 0);
    trainer.train(1, 2);
    const Trainer plain(shapes_of({100, 100}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(1.0));
    plain.train(1, 2);
    EXPECT_TRUE(same(trainer.model.text(), plain.model.text()));
    EXPECT_EQ(exported(trainer.opt(), -1, "trust_ratio"), (std::vector<float>{0, 0}));
}

TEST(StepGroups, MayHaveNoParametersInTheWholeOptimizer) {
    const Trainer trainer({}, make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(1.0, DSOPT_OPTIMIZER_REPORT_NORMS));
    DSOPT_NEW(dsopt_step, step);
    EXPECT_OK(trainer.step(step));
    EXPECT_EQ(report_of(trainer.opt()).calls, 1);
    EXPECT_EQ(report_of(trainer.opt()).grad_norm, 0);
}

// ----------------------------------------------------------------------------------------------------------- zero grad
TEST(ZeroGrad, FillsEveryDtypeWithinItsBounds) {
    std::vector<Shape> shapes;
    for (const int32_t grad : kDtypes)
        for (const int64_t numel : {0, 1, 31, 4097, 100003})
            shapes.push_back({numel, DSOPT_DTYPE_F32, grad, size_of(grad)});
    const Model model(shapes);
    const Context context = make_context(context_desc(3));
    std::vector<dsopt_tensor> list = list_of(model.grads);
    ASSERT_OK(dsopt_zero_grad(context.get(), list.data(), int64_t(list.size()), DSOPT_ZERO_FILL, nullptr));
    for (const Array &grad : model.grads) EXPECT_TRUE(same(grad.text(), std::string(grad.bytes(), '\0')));
    EXPECT_TRUE(model.intact());
    EXPECT_OK(dsopt_zero_grad(context.get(), nullptr, 0, DSOPT_ZERO_FILL, nullptr));
}

TEST(ZeroGrad, ClearsOnlyPointersInModeNone) {
    const Model model(shapes_of({5, 0, 7}));
    const Context context = make_context();
    std::vector<dsopt_tensor> list = list_of(model.grads);
    const std::string before = model.grads[0].text() + model.grads[2].text();
    ASSERT_OK(dsopt_zero_grad(context.get(), list.data(), 3, DSOPT_ZERO_NONE, nullptr));
    for (const dsopt_tensor &tensor : list) EXPECT_EQ(tensor.data, nullptr);
    EXPECT_EQ(list[2].numel, 7);
    EXPECT_TRUE(same(model.grads[0].text() + model.grads[2].text(), before));
    EXPECT_OK(dsopt_zero_grad(context.get(), list.data(), 3, DSOPT_ZERO_FILL, nullptr));
}

// Sizes of entries without data must not be added up: two of the largest would overflow the sum.
TEST(ZeroGrad, IgnoresHugeEntriesWithoutData) {
    const Model model(shapes_of({100}));
    const Context context = make_context(context_desc(2));
    const dsopt_tensor no_data{nullptr, int64_t(1) << 60, DSOPT_DTYPE_F32, 0};
    std::vector<dsopt_tensor> list = {no_data, no_data, model.grads[0].tensor(), no_data};
    ASSERT_OK(dsopt_zero_grad(context.get(), list.data(), 4, DSOPT_ZERO_FILL, nullptr));
    EXPECT_TRUE(same(model.grads[0].text(), std::string(400, '\0')));
}

} // namespace step_sizes_tests
