// SPDX-License-Identifier: Apache-2.0
// Every wrong input of the functions on arrays, of second handles, parameters of existing groups and all-reduces: the
// right status, a text that names the culprit, and nothing changed.
#include "support/onebit.h"

using namespace test;

namespace {

constexpr int32_t kUnknown = 77;
char *one_byte_on(void *data) { return static_cast<char *>(data) + 1; }

/// Lists of tensors with the memory behind them, as a caller of the functional form has them.
class Lists {
public:
    explicit Lists(const Trainer &trainer) {
        for (const dsopt_state_info &info : trainer.state()) {
            arrays_.emplace_back(DSOPT_DTYPE_F32, size_t(info.tensor.numel) + 1, 7.0f);
            state.push_back({arrays_.back().tensor().data, info.tensor.numel, info.tensor.dtype, 0});
            names.emplace_back(info.name);
        }
    }
    std::string bytes() const {
        std::string all;
        for (const Array &array : arrays_) all += array.text();
        return all;
    }
    size_t place_of(const std::string &name) const {
        return size_t(std::find(names.begin(), names.end(), name) - names.begin());
    }
    std::vector<dsopt_tensor> state;
    std::vector<std::string> names;

private:
    std::vector<Array> arrays_;
};

/// What can be wrong with one tensor of a list.
struct Spoilt {
    void (*spoil)(dsopt_tensor &);
    dsopt_status status;
};
constexpr Spoilt kSpoilt[] = {
    {[](dsopt_tensor &t) { t.dtype = kUnknown; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = 0; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = t.dtype == DSOPT_DTYPE_I32 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_I32; },
     DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = DSOPT_DTYPE_F64; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.numel += 1; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.numel = -1; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.numel = INT64_MAX; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.data = one_byte_on(t.data); }, DSOPT_ERR_ALIGNMENT},
    {[](dsopt_tensor &t) { t.reserved = 1; }, DSOPT_ERR_ARGUMENT},
    {[](dsopt_tensor &t) { t.data = nullptr; }, DSOPT_ERR_ARGUMENT}};

// ------------------------------------------------------------------------------------------------------------- handles
TEST(RefusedRetain, ChangesNothing) {
    const Context ctx = make_context(1);
    const Trainer trainer(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                          std::vector<Array>{Array(1, 3, 1.0f)});
    auto *const untouched = reinterpret_cast<dsopt_optimizer *>(16);
    dsopt_optimizer *other = untouched;
    EXPECT_TRUE(refused(dsopt_optimizer_retain(nullptr, &other), DSOPT_ERR_ARGUMENT, "the optimizer is NULL"));
    EXPECT_EQ(other, untouched);
    EXPECT_TRUE(refused(dsopt_optimizer_retain(trainer.opt(), nullptr), DSOPT_ERR_ARGUMENT, "other is NULL"));
}

TEST(RefusedNull, EveryFunctionSaysWhichHandle) {
    float scale = 0;
    int32_t words[12] = {}, reduction = 7;
    dsopt_tensor list[2] = {{&scale, 1, DSOPT_DTYPE_F32, 0}, {words, 12, DSOPT_DTYPE_I32, 0}};
    DSOPT_NEW(dsopt_schedule_info, schedule);
    const std::pair<dsopt_status, const char *> rows[] = {
        {dsopt_optimizer_add_params(nullptr, nullptr, 0), "the optimizer is NULL"},
        {dsopt_optimizer_init_state(nullptr, nullptr, 0, list, 2, nullptr), "the optimizer is NULL"},
        {dsopt_optimizer_next_reduction_on_device(nullptr, list, &reduction, nullptr), "the optimizer is NULL"},
        {dsopt_schedule_decode(nullptr, words, &schedule), "the optimizer is NULL"}};
    for (const auto &[status, text] : rows) EXPECT_EQ(status, DSOPT_ERR_ARGUMENT) << text;
    EXPECT_STREQ(dsopt_last_error(), "the optimizer is NULL");
    EXPECT_TRUE(refused(dsopt_scaler_detach(nullptr), DSOPT_ERR_ARGUMENT, "the scaler is NULL"));
    EXPECT_TRUE(refused(dsopt_scaler_init_state(nullptr, list, 2, nullptr), DSOPT_ERR_ARGUMENT, "the scaler is NULL"));
    EXPECT_TRUE(refused(dsopt_scaler_update_arrays(nullptr, list, 2, nullptr, nullptr), DSOPT_ERR_ARGUMENT,
                        "the scaler is NULL"));
    EXPECT_TRUE(refused(dsopt_comm_all_reduce(nullptr, list, 1, DSOPT_OP_SUM, nullptr), DSOPT_ERR_ARGUMENT,
                        "the comm is NULL"));
    EXPECT_EQ(reduction, 7);
    EXPECT_EQ(scale, 0);
}

// ------------------------------------------------------------------------------------------------- groups and parameters
class AddParams : public testing::Test {
protected:
    AddParams() {
        must(trainer_.add_group(group_of(DSOPT_ALGORITHM_ADAMW), {{Array(DSOPT_DTYPE_F32, 5, 1), "a"}}));
        must(trainer_.add_group(group_of(DSOPT_ALGORITHM_LAMB), {}));
        must(trainer_.step({Array(DSOPT_DTYPE_F32, 5, 1)}));
        before_ = trainer_.snapshot();
    }
    /// Beside a good one, in front of it and behind it.
    void expect_refused(const std::function<void(dsopt_param &)> &spoil, dsopt_status status, const char *words) {
        const Array good(DSOPT_DTYPE_F32, 3, 1), bad(DSOPT_DTYPE_F32, 4, 1);
        for (const int place : {0, 1}) {
            dsopt_param list[2] = {};
            list[1 - place].tensor = good.tensor();
            list[1 - place].name = "good";
            list[place].tensor = bad.tensor();
            list[place].name = "bad";
            spoil(list[place]);
            EXPECT_TRUE(refused(dsopt_optimizer_add_params(trainer_.opt(), list, 2), status, words));
            int64_t groups = 0, params = 0;
            must(dsopt_optimizer_count(trainer_.opt(), &groups, &params));
            EXPECT_EQ(groups, 2);
            EXPECT_EQ(params, 1);
            EXPECT_TRUE(same(before_, trainer_.snapshot()));
        }
    }
    const Context ctx_ = make_context(1);
    Trainer trainer_{ctx_, optimizer_desc()};
    Snapshot before_;
};

TEST_F(AddParams, RefusesWhatAddGroupRefusesAndGroupsThatAreNotThere) {
    for (const int32_t group : {-1, 2, INT32_MAX, INT32_MIN})
        expect_refused([&](dsopt_param &p) { p.group = group; }, DSOPT_ERR_ARGUMENT, std::to_string(group).c_str());
    expect_refused([](dsopt_param &p) { p.tensor.dtype = kUnknown; }, DSOPT_ERR_DTYPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_DTYPE, "I32");
    expect_refused([](dsopt_param &p) { p.tensor.numel = -1; }, DSOPT_ERR_SHAPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.numel = INT64_MAX; }, DSOPT_ERR_SHAPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.data = one_byte_on(p.tensor.data); }, DSOPT_ERR_ALIGNMENT, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.reserved = 1; }, DSOPT_ERR_ARGUMENT, "'bad'");
    expect_refused([](dsopt_param &p) { p.name = "a"; }, DSOPT_ERR_ARGUMENT, "'a'");
    expect_refused([](dsopt_param &p) { p.name = "good"; }, DSOPT_ERR_ARGUMENT, "'good'");
    expect_refused([](dsopt_param &p) { p.name = ""; }, DSOPT_ERR_ARGUMENT, "name");
    expect_refused([](dsopt_param &p) { p.name = "\xff"; }, DSOPT_ERR_ARGUMENT, "UTF-8");
    expect_refused([](dsopt_param &p) { p.ndim = 9; }, DSOPT_ERR_ARGUMENT, "'bad'");
    expect_refused([](dsopt_param &p) { p.flags = 1 << 20; }, DSOPT_ERR_ARGUMENT, "'bad'");
    expect_refused([](dsopt_param &p) { p.flags = DSOPT_PARAM_MASKED; }, DSOPT_ERR_UNSUPPORTED, "'bad'");
    expect_refused([](dsopt_param &p) { p.expert = 1; }, DSOPT_ERR_ARGUMENT, "'bad'");
    expect_refused([](dsopt_param &p) { p.offset = 1; }, DSOPT_ERR_UNSUPPORTED, "'bad'");
    expect_refused([&](dsopt_param &p) { p.tensor.data = trainer_.weight().tensor().data; }, DSOPT_ERR_OVERLAP, "'a'");
}

TEST_F(AddParams, RefusesWrongCountsAndAnOptimizerWithoutGroups) {
    const Array weight(DSOPT_DTYPE_F32, 3, 1);
    dsopt_param param{};
    param.tensor = weight.tensor();
    EXPECT_TRUE(refused(dsopt_optimizer_add_params(trainer_.opt(), &param, -1), DSOPT_ERR_ARGUMENT, "-1"));
    EXPECT_TRUE(refused(dsopt_optimizer_add_params(trainer_.opt(), nullptr, 1), DSOPT_ERR_ARGUMENT, "params is NULL"));
    EXPECT_TRUE(refused(dsopt_optimizer_add_params(trainer_.opt(), &param, INT64_MAX), DSOPT_ERR_SHAPE, "2^31"));
    EXPECT_OK(dsopt_optimizer_add_params(trainer_.opt(), nullptr, 0));
    EXPECT_TRUE(same(before_, trainer_.snapshot()));
    const Trainer empty(ctx_, optimizer_desc());
    EXPECT_TRUE(refused(dsopt_optimizer_add_params(empty.opt(), &param, 1), DSOPT_ERR_STATE, "no groups"));
    param.group = 1;
    const dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM);
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer_.opt(), &group, &param, 1), DSOPT_ERR_ARGUMENT, "group"));
}

TEST_F(AddParams, IsRefusedOnceTheVarianceIsFrozen) {
    const Array weight(DSOPT_DTYPE_F32, 3, 1);
    Trainer trainer(ctx_, optimizer_desc(), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 1),
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    must(trainer.step({Array(DSOPT_DTYPE_F32, 4, 1)}));
    dsopt_param param{};
    param.tensor = weight.tensor();
    param.name = "late";
    const Snapshot before = trainer.snapshot();
    EXPECT_TRUE(refused(dsopt_optimizer_add_params(trainer.opt(), &param, 1), DSOPT_ERR_STATE, "'late'"));
    EXPECT_TRUE(same(before, trainer.snapshot()));
}

// ----------------------------------------------------------------------------------------------------- starting values
TEST(RefusedInitState, NamesEveryWrongTensorAndWritesNothing) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 1024);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.scaler = scaler.get();
    const Trainer trainer(ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 2),
                          std::vector<Array>{Array(DSOPT_DTYPE_F16, 5, 1), Array(DSOPT_DTYPE_F32, 3, 1)});
    Lists lists(trainer);
    const std::vector<Array> weights{Array(DSOPT_DTYPE_F16, 5, 1), Array(DSOPT_DTYPE_F32, 3, 1)};
    std::vector<dsopt_tensor> params = list_of(weights);
    const std::string before = lists.bytes();
    const auto call = [&](const std::vector<dsopt_tensor> *of, const std::vector<dsopt_tensor> &state) {
        return dsopt_optimizer_init_state(trainer.opt(), of != nullptr ? of->data() : nullptr,
                                          of != nullptr ? int64_t(of->size()) : 0, state.data(), int64_t(state.size()),
                                          nullptr);
    };
    for (size_t i = 0; i < lists.state.size(); ++i)
        for (const Spoilt &spoilt : kSpoilt) {
            std::vector<dsopt_tensor> state = lists.state;
            spoilt.spoil(state[i]);
            EXPECT_TRUE(refused(call(&params, state), spoilt.status, lists.names[i].c_str())) << i;
        }
    for (size_t i = 0; i < params.size(); ++i)
        for (const Spoilt &spoilt : kSpoilt) {
            std::vector<dsopt_tensor> bad = params;
            spoilt.spoil(bad[i]);
            if (bad[i].data == nullptr && params[i].dtype == DSOPT_DTYPE_F32) continue; // it has no master
            EXPECT_TRUE(refused(call(&bad, lists.state), spoilt.status, i == 0 ? "p0" : "p1")) << i;
        }
    params[0].dtype = DSOPT_DTYPE_BF16;
    EXPECT_TRUE(refused(call(&params, lists.state), DSOPT_ERR_DTYPE, "p0"));
    params[0].dtype = DSOPT_DTYPE_F16;
    std::vector<dsopt_tensor> shorter = lists.state;
    shorter.pop_back();
    EXPECT_TRUE(refused(call(&params, shorter), DSOPT_ERR_SHAPE, "entries"));
    EXPECT_TRUE(refused(call(&params, {}), DSOPT_ERR_SHAPE, "the state list has 0 entries"));
    const int64_t count = int64_t(lists.state.size());
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(trainer.opt(), params.data(), 2, nullptr, count, nullptr),
                        DSOPT_ERR_ARGUMENT, "the state list is NULL"));
    EXPECT_TRUE(refused(call(nullptr, lists.state), DSOPT_ERR_ARGUMENT, "'p0'"));
    // One tensor of exact size for two parameters: the second one is not read.
    const std::vector<dsopt_tensor> one(params.begin(), params.begin() + 1);
    EXPECT_TRUE(refused(call(&one, lists.state), DSOPT_ERR_SHAPE, "the list of parameters has 1 entries, not 2"));
    EXPECT_TRUE(refused(
        dsopt_optimizer_init_state(trainer.opt(), nullptr, 2, lists.state.data(), int64_t(lists.state.size()), nullptr),
        DSOPT_ERR_ARGUMENT, "the list of parameters is NULL"));
    EXPECT_EQ(lists.bytes(), before);
    EXPECT_OK(call(&params, lists.state));
    EXPECT_NE(lists.bytes(), before);
    const Trainer empty(ctx, optimizer_desc());
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(empty.opt(), nullptr, 0, lists.state.data(), 0, nullptr),
                        DSOPT_ERR_STATE, "no groups"));
}

// -------------------------------------------------------------------------------------------------------------- schedule
TEST(RefusedReduction, NamesTheScheduleAndWritesNothing) {
    const Context ctx = make_context(1);
    const Trainer onebit(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2),
                         std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const Trainer plain(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAM),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const Trainer empty(ctx, optimizer_desc());
    const Shared<int32_t> words(9), reductions{7, 7};
    int32_t *const reduction = reductions.data();
    const dsopt_tensor good{words.data(), 8, DSOPT_DTYPE_I32, 0};
    for (const Spoilt &spoilt : kSpoilt) {
        dsopt_tensor schedule = good;
        spoilt.spoil(schedule);
        EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &schedule, reduction, nullptr),
                            spoilt.status, "schedule"));
    }
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), nullptr, reduction, nullptr),
                        DSOPT_ERR_ARGUMENT, "schedule"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(plain.opt(), &good, reduction, nullptr),
                        DSOPT_ERR_ARGUMENT, "schedule"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &good, nullptr, nullptr),
                        DSOPT_ERR_ARGUMENT, "reduction is NULL"));
    auto *const odd = reinterpret_cast<int32_t *>(one_byte_on(reduction));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &good, odd, nullptr),
                        DSOPT_ERR_ALIGNMENT, "reduction"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(empty.opt(), nullptr, reduction, nullptr),
                        DSOPT_ERR_STATE, "no groups"));
    EXPECT_EQ(reductions[0], 7);
    EXPECT_OK(dsopt_optimizer_next_reduction_on_device(plain.opt(), nullptr, reduction, nullptr));
    EXPECT_EQ(reductions[0], DSOPT_REDUCTION_FULL);
    EXPECT_EQ(reductions[1], 7);
}

/// As a later header has it, with members behind those that the library knows.
struct LaterSchedule {
    dsopt_schedule_info known;
    unsigned char tail[24];
};

TEST(RefusedSchedule, DecodesNoFurtherThanBothSidesKnow) {
    const Context ctx = make_context(1);
    const Trainer onebit(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 9),
                         std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const Trainer plain(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAM),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const int32_t words[8] = {5, 0, 2, 1, 0, 0, 0, 0};
    DSOPT_NEW(dsopt_schedule_info, info);
    EXPECT_TRUE(refused(dsopt_schedule_decode(onebit.opt(), nullptr, &info), DSOPT_ERR_ARGUMENT, "words is NULL"));
    EXPECT_TRUE(refused(dsopt_schedule_decode(onebit.opt(), words, nullptr), DSOPT_ERR_ARGUMENT,
                        "dsopt_schedule_info is NULL"));
    EXPECT_TRUE(refused(dsopt_schedule_decode(plain.opt(), words, &info), DSOPT_ERR_UNSUPPORTED, "1-bit"));
    for (const size_t size : {size_t(0), size_t(8), sizeof info - 1}) {
        info.size = size;
        EXPECT_TRUE(
            refused(dsopt_schedule_decode(onebit.opt(), words, &info), DSOPT_ERR_VERSION, "dsopt_schedule_info"));
    }
    EXPECT_EQ(info.step, 0);
    LaterSchedule later;
    std::memset(static_cast<void *>(&later), 0x5a, sizeof later);
    later.known.size = sizeof later;
    ASSERT_OK(dsopt_schedule_decode(onebit.opt(), words, &later.known)); // an output: its tail is not looked at
    EXPECT_EQ(later.known.size, sizeof later);
    EXPECT_EQ(later.known.step, 5);
    EXPECT_EQ(later.known.var_interval, 2);
    EXPECT_EQ(later.known.var_counter, 1);
    EXPECT_EQ(later.known.reduction, DSOPT_REDUCTION_FULL) << "the 6th step, every second one moves the variance";
    for (const unsigned char byte : later.tail) EXPECT_EQ(byte, 0x5a);
}

TEST(RefusedSchedule, WordsThatCannotBeAreDecodedAllTheSame) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kFamily) {
        const Trainer trainer(ctx, optimizer_desc(), group_for(algorithm, 9),
                              std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
        for (const int32_t value : {-1, INT32_MIN, INT32_MAX, 0x5a5a5a5a}) {
            int32_t words[8];
            std::fill(std::begin(words), std::end(words), value);
            DSOPT_NEW(dsopt_schedule_info, info);
            EXPECT_OK(dsopt_schedule_decode(trainer.opt(), words, &info));
            EXPECT_EQ(info.step, value);
            EXPECT_GE(info.reduction, DSOPT_REDUCTION_FULL);
            EXPECT_LE(info.reduction, DSOPT_REDUCTION_LOCAL);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- scaler
TEST(RefusedScalerArrays, NameTheTensorAndWriteNothing) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 1024);
    const Shared<float> scale{3, 3};
    const Shared<int32_t> words(13, 9), overflow{0, 0};
    const dsopt_tensor good[2] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {words.data(), 12, DSOPT_DTYPE_I32, 0}};
    const auto both = [&](const dsopt_tensor *list, int64_t count, dsopt_status status, const char *part) {
        EXPECT_TRUE(refused(dsopt_scaler_init_state(scaler.get(), list, count, nullptr), status, part));
        EXPECT_TRUE(
            refused(dsopt_scaler_update_arrays(scaler.get(), list, count, overflow.data(), nullptr), status, part));
    };
    for (const int place : {0, 1})
        for (const Spoilt &spoilt : kSpoilt) {
            dsopt_tensor list[2] = {good[0], good[1]};
            spoilt.spoil(list[place]);
            both(list, 2, spoilt.status, place == 0 ? "loss_scale" : "scaler");
        }
    const dsopt_tensor swapped[2] = {good[1], good[0]};
    both(swapped, 2, DSOPT_ERR_DTYPE, "loss_scale");
    both(nullptr, 2, DSOPT_ERR_ARGUMENT, "NULL");
    for (const int64_t count : {-1, 0, 1, 3}) both(good, count, DSOPT_ERR_SHAPE, std::to_string(count).c_str());
    auto *const odd = reinterpret_cast<int32_t *>(one_byte_on(overflow.data()));
    EXPECT_TRUE(
        refused(dsopt_scaler_update_arrays(scaler.get(), good, 2, odd, nullptr), DSOPT_ERR_ALIGNMENT, "overflow"));
    EXPECT_EQ(scale[0], 3);
    for (const int32_t word : words) EXPECT_EQ(word, 9);
    EXPECT_OK(dsopt_scaler_init_state(scaler.get(), good, 2, nullptr));
    EXPECT_EQ(scale[0], 1024);
    EXPECT_EQ(scale[1], 3);
    EXPECT_EQ(words[12], 9);
}

TEST(RefusedScalerDecode, SaysWhatIsNullOrTooShort) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 512);
    const Shared<float> scale(1);
    const Shared<int32_t> memory(12);
    const dsopt_tensor list[2] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {memory.data(), 12, DSOPT_DTYPE_I32, 0}};
    must(dsopt_scaler_init_state(scaler.get(), list, 2, nullptr));
    const int32_t *const words = memory.data();
    DSOPT_NEW(dsopt_scaler_info, info);
    EXPECT_TRUE(refused(dsopt_scaler_decode(nullptr, &info), DSOPT_ERR_ARGUMENT, "words is NULL"));
    EXPECT_TRUE(refused(dsopt_scaler_decode(words, nullptr), DSOPT_ERR_ARGUMENT, "dsopt_scaler_info is NULL"));
    info.size -= 1;
    EXPECT_TRUE(refused(dsopt_scaler_decode(words, &info), DSOPT_ERR_VERSION, "dsopt_scaler_info"));
    EXPECT_EQ(info.scale, 0);
    info.size += 1;
    ASSERT_OK(dsopt_scaler_decode(words, &info));
    EXPECT_EQ(info.scale, 512);
    EXPECT_EQ(info.last_overflow, -1);
    EXPECT_EQ(info.hysteresis, 1);
}

// ----------------------------------------------------------------------------------------------------------- all-reduce
TEST(RefusedAllReduce, NamesTheTensorChangesNothingAndCallsNobody) {
    const Context ctx = make_context(1);
    const CommId id = new_id();
    std::vector<Comm> comms(2);
    run_ranks(2, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, 2); });
    const Comm self = self_comm(ctx);
    for (const Comm *comm : {&std::as_const(comms[0]), &self}) {
        std::vector<Array> arrays{Array(DSOPT_DTYPE_F32, 4, 1), Array(DSOPT_DTYPE_F16, 5, 2)};
        const std::vector<dsopt_tensor> good = list_of(arrays);
        const auto call = [&](const std::vector<dsopt_tensor> &list, int32_t op = DSOPT_OP_SUM) {
            return dsopt_comm_all_reduce(comm->get(), list.data(), int64_t(list.size()), op, nullptr);
        };
        for (size_t i = 0; i < good.size(); ++i)
            for (const Spoilt &spoilt : kSpoilt) {
                std::vector<dsopt_tensor> list = good;
                spoilt.spoil(list[i]);
                if (list[i].data == nullptr || list[i].numel == good[i].numel + 1) continue; // both are legal here
                EXPECT_TRUE(refused(call(list), spoilt.status, i == 0 ? "'0'" : "'1'"));
            }
        for (const int32_t op : {-1, 3, kUnknown})
            EXPECT_TRUE(refused(call(good, op), DSOPT_ERR_ARGUMENT, std::to_string(op).c_str()));
        EXPECT_TRUE(refused(dsopt_comm_all_reduce(comm->get(), good.data(), -1, DSOPT_OP_SUM, nullptr),
                            DSOPT_ERR_ARGUMENT, "-1"));
        EXPECT_TRUE(
            refused(dsopt_comm_all_reduce(comm->get(), nullptr, 1, DSOPT_OP_SUM, nullptr), DSOPT_ERR_ARGUMENT, "NULL"));
        EXPECT_OK(dsopt_comm_all_reduce(comm->get(), nullptr, 0, DSOPT_OP_SUM, nullptr));
        EXPECT_EQ(arrays[0].floats(), std::vector<float>(4, 1));
        EXPECT_EQ(arrays[1].floats(), std::vector<float>(5, 2));
        EXPECT_EQ(info_of(*comm).calls, 0);
        EXPECT_EQ(info_of(*comm).status, DSOPT_OK);
    }
}

} // namespace
