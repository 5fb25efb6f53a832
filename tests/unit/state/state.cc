// SPDX-License-Identifier: Apache-2.0
// State tensors: list before the first step, import and export, bind, reset.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace state_tests {

struct Entry {
    std::string name;
    int64_t param;
    int32_t dtype;
    int64_t numel;
    int32_t flags;
    bool operator==(const Entry &other) const = default;
    friend void PrintTo(const Entry &e, std::ostream *out) {
        *out << e.name << " of " << e.param << ": " << e.numel << " of " << e.dtype;
    }
};
std::vector<Entry> list_state(const dsopt_optimizer *opt) {
    std::vector<Entry> list;
    for (int64_t i = 0; i < state_count(opt); ++i) {
        const dsopt_state_info info = state_info(opt, i);
        EXPECT_EQ(info.tensor.reserved, 0);
        list.push_back({info.name, info.param, info.tensor.dtype, info.tensor.numel, info.flags});
    }
    return list;
}

/// Adds a group of AdamW and one of LAMB, with two parameters each.
void add_groups(Trainer &trainer) {
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 2);
    trainer.add(make_group(DSOPT_ALGORITHM_LAMB), 2);
}
/// Shapes of every dtype, one of them empty.
std::vector<Shape> four_shapes() {
    return {
        {7, DSOPT_DTYPE_F32}, {0, DSOPT_DTYPE_BF16}, {5000, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16}, {3, DSOPT_DTYPE_F32}};
}

std::vector<Array> buffers_for(const dsopt_optimizer *opt) {
    std::vector<Array> buffers;
    for (const Entry &entry : list_state(opt))
        buffers.emplace_back(entry.dtype, size_t(entry.numel), 0.0f, size_of(entry.dtype));
    return buffers;
}

TEST(State, ListsNamesOrderAndSizesBeforeTheFirstStep) {
    Trainer trainer(four_shapes(), optimizer_desc());
    EXPECT_EQ(state_count(trainer.opt()), 0);
    add_groups(trainer);
    const std::vector<Entry> wanted = {{"exp_avg", 0, DSOPT_DTYPE_F32, 7, 0},
                                       {"exp_avg_sq", 0, DSOPT_DTYPE_F32, 7, 0},
                                       {"master", 1, DSOPT_DTYPE_F32, 0, DSOPT_STATE_FROM_PARAM},
                                       {"exp_avg", 1, DSOPT_DTYPE_F32, 0, 0},
                                       {"exp_avg_sq", 1, DSOPT_DTYPE_F32, 0, 0},
                                       {"master", 2, DSOPT_DTYPE_F32, 5000, DSOPT_STATE_FROM_PARAM},
                                       {"exp_avg", 2, DSOPT_DTYPE_F32, 5000, 0},
                                       {"exp_avg_sq", 2, DSOPT_DTYPE_F32, 5000, 0},
                                       {"exp_avg", 3, DSOPT_DTYPE_F32, 3, 0},
                                       {"exp_avg_sq", 3, DSOPT_DTYPE_F32, 3, 0},
                                       {"trust_ratio", -1, DSOPT_DTYPE_F32, 4, 0},
                                       {"step", -1, DSOPT_DTYPE_I32, 4, 0}};
    EXPECT_EQ(list_state(trainer.opt()), wanted);
    for (int64_t i = 0; i < state_count(trainer.opt()); ++i)
        EXPECT_EQ(state_info(trainer.opt(), i).tensor.data, nullptr);
    trainer.train(1);
    EXPECT_EQ(list_state(trainer.opt()), wanted);
    for (int64_t i = 0; i < state_count(trainer.opt()); ++i)
        EXPECT_NE(state_info(trainer.opt(), i).tensor.data, nullptr);
}

TEST(State, HasMomentsOfParameterDtypeInCompatMode) {
    for (const bool compat : {false, true}) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER);
        desc.compat = compat ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
        const Trainer trainer(shapes_of({5}, DSOPT_DTYPE_F16), make_group(DSOPT_ALGORITHM_ADAM), desc);
        const int32_t moments = compat ? DSOPT_DTYPE_F16 : DSOPT_DTYPE_F32;
        EXPECT_EQ(list_state(trainer.opt()), (std::vector<Entry>{{"exp_avg", 0, moments, 5, 0},
                                                                 {"exp_avg_sq", 0, moments, 5, 0},
                                                                 {"step", -1, DSOPT_DTYPE_I32, 1, 0}}));
    }
}

TEST(State, ReturnsNamesInStaticStorage) {
    const char *name = nullptr;
    {
        const Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAM));
        name = state_info(trainer.opt(), 1).name;
    }
    EXPECT_STREQ(name, "exp_avg_sq");
}

TEST(StateExport, ReturnsInitialValuesBeforeTheFirstStep) {
    Trainer trainer(four_shapes(), optimizer_desc());
    add_groups(trainer);
    const std::vector<float> master = exported(trainer.opt(), 2, "master");
    for (int64_t i = 0; i < 5000; ++i) ASSERT_EQ(master[size_t(i)], trainer.model.params[2][size_t(i)]);
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg"), std::vector<float>(7, 0));
    EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>(4, 0));
    EXPECT_EQ(exported(trainer.opt(), -1, "trust_ratio"), std::vector<float>(4, 0));
}

TEST(StateImport, RestoresExportedState) {
    Trainer from(four_shapes(), optimizer_desc()), to(four_shapes(), optimizer_desc());
    add_groups(from);
    add_groups(to);
    from.train(1, 3);
    std::memcpy(to.model.params[0].data(), from.model.params[0].data(), from.model.params[0].bytes());
    std::memcpy(to.model.params[2].data(), from.model.params[2].data(), from.model.params[2].bytes());
    std::memcpy(to.model.params[3].data(), from.model.params[3].data(), from.model.params[3].bytes());
    for (int64_t i = 0; i < state_count(from.opt()); ++i) {
        const dsopt_tensor tensor = state_info(from.opt(), i).tensor;
        std::vector<char> bytes(size_t(tensor.numel) * size_of(tensor.dtype));
        ASSERT_OK(dsopt_optimizer_export(from.opt(), i, bytes.data(), bytes.size()));
        ASSERT_OK(dsopt_optimizer_import(to.opt(), i, bytes.data(), bytes.size()));
    }
    EXPECT_TRUE(same(from.text(), to.text()));
    from.train(4, 6);
    to.train(4, 6);
    EXPECT_TRUE(same(from.text(), to.text()));
}

TEST(RefusedStateCopy, NamesWrongBuffersAndIndices) {
    const Trainer trainer(shapes_of({5, 0}), make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    const std::string before = trainer.text();
    std::vector<char> bytes(64, 0x11);
    dsopt_optimizer *const opt = trainer.opt();
    for (const size_t size : {size_t(0), size_t(19), size_t(21), SIZE_MAX}) {
        EXPECT_TRUE(refused(dsopt_optimizer_export(opt, 0, bytes.data(), size), DSOPT_ERR_SHAPE, "exp_avg|20"));
        EXPECT_TRUE(refused(dsopt_optimizer_import(opt, 0, bytes.data(), size), DSOPT_ERR_SHAPE, "exp_avg|20"));
    }
    for (const int64_t index : {int64_t(-1), int64_t(5), INT64_MAX, INT64_MIN}) {
        EXPECT_TRUE(refused(dsopt_optimizer_export(opt, index, bytes.data(), 20), DSOPT_ERR_ARGUMENT,
                            "index|" + std::to_string(index)));
        EXPECT_TRUE(refused(dsopt_optimizer_import(opt, index, bytes.data(), 20), DSOPT_ERR_ARGUMENT,
                            "index|" + std::to_string(index)));
        DSOPT_NEW(dsopt_state_info, info);
        EXPECT_TRUE(
            refused(dsopt_optimizer_state(opt, index, &info), DSOPT_ERR_ARGUMENT, "index|" + std::to_string(index)));
    }
    EXPECT_TRUE(refused(dsopt_optimizer_export(opt, 0, nullptr, 20), DSOPT_ERR_ARGUMENT, "host"));
    EXPECT_TRUE(refused(dsopt_optimizer_import(opt, 0, nullptr, 20), DSOPT_ERR_ARGUMENT, "host"));
    EXPECT_OK(dsopt_optimizer_export(opt, 2, nullptr, 0)); // exp_avg of the empty tensor
    EXPECT_OK(dsopt_optimizer_import(opt, 2, nullptr, 0));
    EXPECT_EQ(bytes, std::vector<char>(64, 0x11));
    EXPECT_TRUE(same(trainer.text(), before));
}

TEST(StateExport, NeedsMemoryOfTheParameterForAMaster) {
    const Model model(shapes_of({5}, DSOPT_DTYPE_BF16));
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    auto list = model.registered();
    list[0].tensor.data = nullptr;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, list.data(), 1));
    std::vector<float> values(5);
    EXPECT_TRUE(refused(dsopt_optimizer_export(opt.get(), 0, values.data(), 20), DSOPT_ERR_STATE, "'p0'|memory"));
    const std::vector<dsopt_tensor> params = list_of(model.params);
    ASSERT_OK(dsopt_optimizer_bind(opt.get(), DSOPT_BIND_PARAMS, params.data(), 1));
    ASSERT_OK(dsopt_optimizer_export(opt.get(), 0, values.data(), 20));
    EXPECT_EQ(values[4], model.params[0][4]);
}

// ---------------------------------------------------------------------------------------------------------------- bind
TEST(Bind, UsesStateOfTheCallerInPlace) {
    Trainer bound(four_shapes(), optimizer_desc()), own(four_shapes(), optimizer_desc());
    add_groups(bound);
    add_groups(own);
    const std::vector<Array> buffers = buffers_for(bound.opt());
    const std::vector<dsopt_tensor> list = list_of(buffers);
    for (int64_t i = 0; i < 5000; ++i)
        buffers[5].set(i, bound.model.params[2][size_t(i)]); // initial values of the master
    ASSERT_OK(dsopt_optimizer_bind(bound.opt(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    for (size_t i = 0; i < list.size(); ++i)
        EXPECT_EQ(state_info(bound.opt(), int64_t(i)).tensor.data, buffers[i].data());
    bound.train(1, 3);
    own.train(1, 3);
    std::string text;
    for (const Array &buffer : buffers) {
        text += buffer.text();
        EXPECT_TRUE(buffer.intact());
    }
    EXPECT_TRUE(same(text, state_text(own.opt())));
    EXPECT_TRUE(same(bound.text(), own.text()));
}

TEST(Bind, KeepsEntriesWithoutDataInTheEngine) {
    const Trainer trainer(shapes_of({50}), make_group(DSOPT_ALGORITHM_ADAMW)),
        plain(shapes_of({50}), make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    plain.train(1);
    const Array m(DSOPT_DTYPE_F32, 50, 0);
    must(dsopt_optimizer_export(trainer.opt(), 0, m.data(), m.bytes()));
    std::vector<dsopt_tensor> list = {m.tensor(), {nullptr, 50, DSOPT_DTYPE_F32, 0}, {nullptr, 1, DSOPT_DTYPE_I32, 0}};
    ASSERT_OK(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, list.data(), 3));
    EXPECT_EQ(state_info(trainer.opt(), 0).tensor.data, m.data());
    trainer.train(2, 3);
    plain.train(2, 3);
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

TEST(Bind, MovesParametersWithoutCopying) {
    const Trainer trainer(four_shapes(), make_group(DSOPT_ALGORITHM_ADAM)),
        plain(four_shapes(), make_group(DSOPT_ALGORITHM_ADAM));
    trainer.train(1);
    plain.train(1);
    std::vector<Array> other;
    for (const Array &param : trainer.model.params) {
        other.emplace_back(param.dtype(), param.size(), 0.0f, size_of(param.dtype()));
        std::memcpy(other.back().data(), param.data(), param.bytes());
    }
    const std::string before = trainer.model.text();
    const std::vector<dsopt_tensor> list = list_of(other);
    ASSERT_OK(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_PARAMS, list.data(), 4));
    trainer.train(2);
    plain.train(2);
    EXPECT_TRUE(same(trainer.model.text(), before));
    std::string moved;
    for (const Array &buffer : other) moved += buffer.text();
    EXPECT_TRUE(same(moved, plain.model.text()));
}

TEST(Bind, RefusesBadListsAndKeepsTheOldMemory) {
    const Trainer trainer({{50, DSOPT_DTYPE_F32}, {60, DSOPT_DTYPE_BF16}}, make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    dsopt_optimizer *const opt = trainer.opt();
    const std::vector<Array> params = [] {
        std::vector<Array> list;
        list.emplace_back(DSOPT_DTYPE_F32, 50, 0.0f);
        list.emplace_back(DSOPT_DTYPE_BF16, 60, 0.0f);
        return list;
    }();
    const std::vector<Array> state = buffers_for(opt);
    const std::string before = trainer.text();
    struct Case {
        int32_t what;
        void (*change)(std::vector<dsopt_tensor> &list);
        dsopt_status status;
        const char *words;
    };
    const Case cases[] = {
        {DSOPT_BIND_PARAMS, [](auto &l) { l.pop_back(); }, DSOPT_ERR_SHAPE, "1|2"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l.push_back(l[0]); }, DSOPT_ERR_SHAPE, "3|2"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].numel = 61; }, DSOPT_ERR_SHAPE, "'p1'|61"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].numel = -1; }, DSOPT_ERR_SHAPE, "'p1'|-1"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].numel = INT64_MAX; }, DSOPT_ERR_SHAPE, "'p1'|overflows"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].dtype = DSOPT_DTYPE_F16; }, DSOPT_ERR_DTYPE, "'p1'"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].dtype = 99; }, DSOPT_ERR_DTYPE, "'p1'|99"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].reserved = 1; }, DSOPT_ERR_ARGUMENT, "'p1'|reserved"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[0].data = static_cast<char *>(l[0].data) + 2; }, DSOPT_ERR_ALIGNMENT,
         "'p0'|aligned"},
        {DSOPT_BIND_PARAMS, [](auto &l) { l[1].data = static_cast<char *>(l[0].data) + 198; }, DSOPT_ERR_OVERLAP,
         "'p0'|'p1'"},
        {DSOPT_BIND_STATE, [](auto &l) { l.pop_back(); }, DSOPT_ERR_SHAPE, "5|6"},
        {DSOPT_BIND_STATE, [](auto &l) { l[2].numel = 59; }, DSOPT_ERR_SHAPE, "master|'p1'|59"},
        {DSOPT_BIND_STATE, [](auto &l) { l[2].dtype = DSOPT_DTYPE_BF16; }, DSOPT_ERR_DTYPE, "master|'p1'"},
        {DSOPT_BIND_STATE, [](auto &l) { l[5].dtype = DSOPT_DTYPE_F32; }, DSOPT_ERR_DTYPE, "step"},
        {DSOPT_BIND_STATE, [](auto &l) { l[3].reserved = 7; }, DSOPT_ERR_ARGUMENT, "exp_avg|'p1'|reserved"},
        {DSOPT_BIND_STATE, [](auto &l) { l[3].data = static_cast<char *>(l[3].data) + 1; }, DSOPT_ERR_ALIGNMENT,
         "exp_avg|'p1'"},
        {DSOPT_BIND_STATE, [](auto &l) { l[3].data = l[4].data; }, DSOPT_ERR_OVERLAP, "exp_avg|exp_avg_sq|'p1'"},
    };
    for (const Case &c : cases) {
        std::vector<dsopt_tensor> list = list_of(c.what == DSOPT_BIND_PARAMS ? params : state);
        c.change(list);
        EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, c.what, list.data(), int64_t(list.size())), c.status, c.words))
            << c.words;
    }
    std::vector<dsopt_tensor> list = list_of(state);
    list[0].data = trainer.model.params[0].data();
    EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, DSOPT_BIND_STATE, list.data(), 6), DSOPT_ERR_OVERLAP,
                        "exp_avg|parameter|'p0'"));
    list = list_of(params);
    list[0].data = state_info(opt, 0).tensor.data;
    EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, list.data(), 2), DSOPT_ERR_OVERLAP,
                        "exp_avg|parameter|'p0'"));
    for (const int32_t what : {0, 3, -1, INT32_MAX})
        EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, what, list.data(), 2), DSOPT_ERR_ARGUMENT, "what"));
    EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, nullptr, 2), DSOPT_ERR_ARGUMENT, "NULL"));
    EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, DSOPT_BIND_STATE, nullptr, 6), DSOPT_ERR_ARGUMENT, "NULL"));
    EXPECT_TRUE(same(trainer.text(), before));
    const Trainer plain({{50, DSOPT_DTYPE_F32}, {60, DSOPT_DTYPE_BF16}}, make_group(DSOPT_ALGORITHM_ADAMW));
    plain.train(1, 2);
    trainer.train(2);
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

// --------------------------------------------------------------------------------------------------------------- reset
class Reset : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Parts, Reset, testing::Range(0u, 8u));

TEST_P(Reset, RestoresInitialValuesOfTheSelectedParts) {
    Trainer trainer(four_shapes(), optimizer_desc(1.0));
    add_groups(trainer);
    trainer.train(1, 2);
    trainer.model.grads[0].set(0, NAN);
    must(trainer.step(trainer.arguments()));
    dsopt_optimizer *const opt = trainer.opt();
    const std::string params = trainer.model.text();
    const auto m = exported(opt, 2, "exp_avg"), v = exported(opt, 2, "exp_avg_sq"), master = exported(opt, 2, "master");
    ASSERT_OK(dsopt_optimizer_reset(opt, GetParam(), nullptr));
    const bool masters = GetParam() & DSOPT_RESET_MASTERS, moments = GetParam() & DSOPT_RESET_MOMENTS,
               counters = GetParam() & DSOPT_RESET_COUNTERS;
    EXPECT_EQ(exported(opt, 2, "exp_avg"), moments ? std::vector<float>(5000, 0) : m);
    EXPECT_EQ(exported(opt, 2, "exp_avg_sq"), moments ? std::vector<float>(5000, 0) : v);
    std::vector<float> rounded(5000);
    for (int64_t i = 0; i < 5000; ++i) rounded[size_t(i)] = trainer.model.params[2][size_t(i)];
    EXPECT_NE(rounded, master);
    EXPECT_EQ(exported(opt, 2, "master"), masters ? rounded : master);
    EXPECT_EQ(steps(opt), std::vector<int32_t>(4, counters ? 0 : 2));
    EXPECT_EQ(exported(opt, -1, "trust_ratio")[2] == 0, counters);
    EXPECT_EQ(report_of(opt).calls, counters ? 0 : 3);
    EXPECT_EQ(report_of(opt).skipped, counters ? 0 : 1);
    EXPECT_EQ(report_of(opt).skipped_in_row, counters ? 0 : 1);
    EXPECT_TRUE(same(trainer.model.text(), params));
}

TEST(ResetAll, TrainsLikeANewOptimizer) {
    const Trainer trainer(shapes_of({500, 3}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_LAMB));
    const std::string start = trainer.model.text();
    trainer.train(1, 3);
    const std::string trained = trainer.text();
    std::memcpy(trainer.model.params[0].data(), start.data(), 1000);
    std::memcpy(trainer.model.params[1].data(), start.data() + 1000, 6);
    ASSERT_OK(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS | DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS,
                                    nullptr));
    trainer.train(1, 3);
    EXPECT_TRUE(same(trainer.text(), trained));
}

TEST(RefusedReset, NamesUnknownPartsAndMissingMemory) {
    const Model model(shapes_of({5}, DSOPT_DTYPE_BF16));
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    auto list = model.registered();
    list[0].tensor.data = nullptr;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, list.data(), 1));
    EXPECT_TRUE(
        refused(dsopt_optimizer_reset(opt.get(), DSOPT_RESET_MASTERS, nullptr), DSOPT_ERR_STATE, "'p0'|memory"));
    EXPECT_OK(dsopt_optimizer_reset(opt.get(), DSOPT_RESET_MOMENTS, nullptr));
    EXPECT_TRUE(refused(dsopt_optimizer_reset(opt.get(), 1u << 30, nullptr), DSOPT_ERR_ARGUMENT, "0x40000000"));
    EXPECT_TRUE(refused(dsopt_optimizer_reset(opt.get(), 0x80000001u, nullptr), DSOPT_ERR_ARGUMENT, "0x8"));
}

} // namespace state_tests
