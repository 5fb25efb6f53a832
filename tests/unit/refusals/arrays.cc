// SPDX-License-Identifier: Apache-2.0
// Invalid input of the functions on arrays, of retain, of parameters for existing groups and of all-reduces. Each call
// returns the documented status and a text that names the invalid argument, and changes nothing.
#include "support/onebit.h"

using namespace test;

namespace refusals_arrays_tests {

constexpr int32_t kUnknown = 77;
char *one_byte_after(void *data) { return static_cast<char *>(data) + 1; }

/// State in memory of the caller, as for dsopt_optimizer_apply.
class CallerState {
public:
    explicit CallerState(const Trainer &trainer) {
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
    std::vector<dsopt_tensor> state;
    std::vector<std::string> names;

private:
    std::vector<Array> arrays_;
};

/// A change that makes one tensor of a list invalid.
struct InvalidTensor {
    void (*apply)(dsopt_tensor &);
    dsopt_status status;
};
constexpr InvalidTensor kInvalidTensors[] = {
    {[](dsopt_tensor &t) { t.dtype = kUnknown; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = 0; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = t.dtype == DSOPT_DTYPE_I32 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_I32; },
     DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.dtype = DSOPT_DTYPE_F64; }, DSOPT_ERR_DTYPE},
    {[](dsopt_tensor &t) { t.numel += 1; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.numel = -1; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.numel = INT64_MAX; }, DSOPT_ERR_SHAPE},
    {[](dsopt_tensor &t) { t.data = one_byte_after(t.data); }, DSOPT_ERR_ALIGNMENT},
    {[](dsopt_tensor &t) { t.reserved = 1; }, DSOPT_ERR_ARGUMENT},
    {[](dsopt_tensor &t) { t.data = nullptr; }, DSOPT_ERR_ARGUMENT}};

// ------------------------------------------------------------------------------------------------------------- handles
TEST(RetainValidation, RefusesNullArguments) {
    const Context ctx = make_context(1);
    const Trainer trainer(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                          std::vector<Array>{Array(1, 3, 1.0f)});
    auto *const untouched = reinterpret_cast<dsopt_optimizer *>(16);
    dsopt_optimizer *other = untouched;
    EXPECT_TRUE(refused(dsopt_optimizer_retain(nullptr, &other), DSOPT_ERR_ARGUMENT, "the optimizer is NULL"));
    EXPECT_EQ(other, untouched);
    EXPECT_TRUE(refused(dsopt_optimizer_retain(trainer.opt(), nullptr), DSOPT_ERR_ARGUMENT, "other is NULL"));
}

TEST(NullHandleValidation, NamesNullHandle) {
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

// ----------------------------------------------------------------------------------------------- groups and parameters
class AddParamsValidation : public testing::Test {
protected:
    AddParamsValidation() {
        must(trainer_.add_group(group_of(DSOPT_ALGORITHM_ADAMW), {{Array(DSOPT_DTYPE_F32, 5, 1), "a"}}));
        must(trainer_.add_group(group_of(DSOPT_ALGORITHM_LAMB), {}));
        must(trainer_.step({Array(DSOPT_DTYPE_F32, 5, 1)}));
        before_ = trainer_.snapshot();
    }
    /// Adds an invalid parameter before and after a valid one.
    void expect_refused(const std::function<void(dsopt_param &)> &change, dsopt_status status, const char *words) {
        const Array good(DSOPT_DTYPE_F32, 3, 1), bad(DSOPT_DTYPE_F32, 4, 1);
        for (const int index : {0, 1}) {
            dsopt_param list[2] = {};
            list[1 - index].tensor = good.tensor();
            list[1 - index].name = "good";
            list[index].tensor = bad.tensor();
            list[index].name = "bad";
            change(list[index]);
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

TEST_F(AddParamsValidation, RefusesInvalidParamsAndGroups) {
    for (const int32_t group : {-1, 2, INT32_MAX, INT32_MIN})
        expect_refused([&](dsopt_param &p) { p.group = group; }, DSOPT_ERR_ARGUMENT, std::to_string(group).c_str());
    expect_refused([](dsopt_param &p) { p.tensor.dtype = kUnknown; }, DSOPT_ERR_DTYPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_DTYPE, "I32");
    expect_refused([](dsopt_param &p) { p.tensor.numel = -1; }, DSOPT_ERR_SHAPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.numel = INT64_MAX; }, DSOPT_ERR_SHAPE, "'bad'");
    expect_refused([](dsopt_param &p) { p.tensor.data = one_byte_after(p.tensor.data); }, DSOPT_ERR_ALIGNMENT, "'bad'");
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

TEST_F(AddParamsValidation, RefusesWrongCountsAndMissingGroups) {
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

TEST_F(AddParamsValidation, RefusesParamsAfterVarianceFreeze) {
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
TEST(InitStateValidation, NamesWrongTensorAndWritesNothing) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 1024);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.scaler = scaler.get();
    const Trainer trainer(ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 2),
                          std::vector<Array>{Array(DSOPT_DTYPE_F16, 5, 1), Array(DSOPT_DTYPE_F32, 3, 1)});
    CallerState caller(trainer);
    const std::vector<Array> weights{Array(DSOPT_DTYPE_F16, 5, 1), Array(DSOPT_DTYPE_F32, 3, 1)};
    std::vector<dsopt_tensor> params = list_of(weights);
    const std::string before = caller.bytes();
    const auto call = [&](const std::vector<dsopt_tensor> *list, const std::vector<dsopt_tensor> &state) {
        return dsopt_optimizer_init_state(trainer.opt(), list != nullptr ? list->data() : nullptr,
                                          list != nullptr ? int64_t(list->size()) : 0, state.data(),
                                          int64_t(state.size()), nullptr);
    };
    for (size_t i = 0; i < caller.state.size(); ++i)
        for (const InvalidTensor &invalid : kInvalidTensors) {
            std::vector<dsopt_tensor> state = caller.state;
            invalid.apply(state[i]);
            EXPECT_TRUE(refused(call(&params, state), invalid.status, caller.names[i].c_str())) << i;
        }
    for (size_t i = 0; i < params.size(); ++i)
        for (const InvalidTensor &invalid : kInvalidTensors) {
            std::vector<dsopt_tensor> bad = params;
            invalid.apply(bad[i]);
            if (bad[i].data == nullptr && params[i].dtype == DSOPT_DTYPE_F32)
                continue; // fp32 parameters have no master
            EXPECT_TRUE(refused(call(&bad, caller.state), invalid.status, i == 0 ? "p0" : "p1")) << i;
        }
    params[0].dtype = DSOPT_DTYPE_BF16;
    EXPECT_TRUE(refused(call(&params, caller.state), DSOPT_ERR_DTYPE, "p0"));
    params[0].dtype = DSOPT_DTYPE_F16;
    std::vector<dsopt_tensor> shorter = caller.state;
    shorter.pop_back();
    EXPECT_TRUE(refused(call(&params, shorter), DSOPT_ERR_SHAPE, "entries"));
    EXPECT_TRUE(refused(call(&params, {}), DSOPT_ERR_SHAPE, "the state list has 0 entries"));
    const int64_t count = int64_t(caller.state.size());
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(trainer.opt(), params.data(), 2, nullptr, count, nullptr),
                        DSOPT_ERR_ARGUMENT, "the state list is NULL"));
    EXPECT_TRUE(refused(call(nullptr, caller.state), DSOPT_ERR_ARGUMENT, "'p0'"));
    // The list has one entry for two parameters: a read of the second one would be out of bounds.
    const std::vector<dsopt_tensor> one_param(params.begin(), params.begin() + 1);
    EXPECT_TRUE(
        refused(call(&one_param, caller.state), DSOPT_ERR_SHAPE, "the list of parameters has 1 entries, not 2"));
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(trainer.opt(), nullptr, 2, caller.state.data(),
                                                   int64_t(caller.state.size()), nullptr),
                        DSOPT_ERR_ARGUMENT, "the list of parameters is NULL"));
    EXPECT_EQ(caller.bytes(), before);
    EXPECT_OK(call(&params, caller.state));
    EXPECT_NE(caller.bytes(), before);
    const Trainer empty(ctx, optimizer_desc());
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(empty.opt(), nullptr, 0, caller.state.data(), 0, nullptr),
                        DSOPT_ERR_STATE, "no groups"));
}

// ------------------------------------------------------------------------------------------------------------ schedule
TEST(NextReductionValidation, NamesScheduleAndWritesNothing) {
    const Context ctx = make_context(1);
    const Trainer onebit(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2),
                         std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const Trainer plain(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAM),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    const Trainer empty(ctx, optimizer_desc());
    const Shared<int32_t> words(9), reductions{7, 7};
    int32_t *const reduction = reductions.data();
    const dsopt_tensor good{words.data(), 8, DSOPT_DTYPE_I32, 0};
    for (const InvalidTensor &invalid : kInvalidTensors) {
        dsopt_tensor schedule = good;
        invalid.apply(schedule);
        EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &schedule, reduction, nullptr),
                            invalid.status, "schedule"));
    }
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), nullptr, reduction, nullptr),
                        DSOPT_ERR_ARGUMENT, "schedule"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(plain.opt(), &good, reduction, nullptr),
                        DSOPT_ERR_ARGUMENT, "schedule"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &good, nullptr, nullptr),
                        DSOPT_ERR_ARGUMENT, "reduction is NULL"));
    auto *const misaligned = reinterpret_cast<int32_t *>(one_byte_after(reduction));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(onebit.opt(), &good, misaligned, nullptr),
                        DSOPT_ERR_ALIGNMENT, "reduction"));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(empty.opt(), nullptr, reduction, nullptr),
                        DSOPT_ERR_STATE, "no groups"));
    EXPECT_EQ(reductions[0], 7);
    EXPECT_OK(dsopt_optimizer_next_reduction_on_device(plain.opt(), nullptr, reduction, nullptr));
    EXPECT_EQ(reductions[0], DSOPT_REDUCTION_FULL);
    EXPECT_EQ(reductions[1], 7);
}

/// The struct of a later header, with additional members.
struct LaterSchedule {
    dsopt_schedule_info known;
    unsigned char tail[24];
};

TEST(ScheduleDecode, RefusesSmallerAndAcceptsLargerStruct) {
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
    // The tail of an output is neither checked nor written.
    ASSERT_OK(dsopt_schedule_decode(onebit.opt(), words, &later.known));
    EXPECT_EQ(later.known.size, sizeof later);
    EXPECT_EQ(later.known.step, 5);
    EXPECT_EQ(later.known.var_interval, 2);
    EXPECT_EQ(later.known.var_counter, 1);
    EXPECT_EQ(later.known.reduction, DSOPT_REDUCTION_FULL)
        << "the variance is updated in every second step, also in the 6th one";
    for (const unsigned char byte : later.tail) EXPECT_EQ(byte, 0x5a);
}

TEST(ScheduleDecode, AcceptsImpossibleWords) {
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

// -------------------------------------------------------------------------------------------------------------- scaler
TEST(ScalerArraysValidation, NamesWrongTensorAndWritesNothing) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 1024);
    const Shared<float> scale{3, 3};
    const Shared<int32_t> words(13, 9), overflow{0, 0};
    const dsopt_tensor good[2] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {words.data(), 12, DSOPT_DTYPE_I32, 0}};
    const auto expect_both_refuse = [&](const dsopt_tensor *list, int64_t count, dsopt_status status,
                                        const char *words) {
        EXPECT_TRUE(refused(dsopt_scaler_init_state(scaler.get(), list, count, nullptr), status, words));
        EXPECT_TRUE(
            refused(dsopt_scaler_update_arrays(scaler.get(), list, count, overflow.data(), nullptr), status, words));
    };
    for (const int index : {0, 1})
        for (const InvalidTensor &invalid : kInvalidTensors) {
            dsopt_tensor list[2] = {good[0], good[1]};
            invalid.apply(list[index]);
            expect_both_refuse(list, 2, invalid.status, index == 0 ? "loss_scale" : "scaler");
        }
    const dsopt_tensor swapped[2] = {good[1], good[0]};
    expect_both_refuse(swapped, 2, DSOPT_ERR_DTYPE, "loss_scale");
    expect_both_refuse(nullptr, 2, DSOPT_ERR_ARGUMENT, "NULL");
    for (const int64_t count : {-1, 0, 1, 3})
        expect_both_refuse(good, count, DSOPT_ERR_SHAPE, std::to_string(count).c_str());
    auto *const misaligned = reinterpret_cast<int32_t *>(one_byte_after(overflow.data()));
    EXPECT_TRUE(refused(dsopt_scaler_update_arrays(scaler.get(), good, 2, misaligned, nullptr), DSOPT_ERR_ALIGNMENT,
                        "overflow"));
    EXPECT_EQ(scale[0], 3);
    for (const int32_t word : words) EXPECT_EQ(word, 9);
    EXPECT_OK(dsopt_scaler_init_state(scaler.get(), good, 2, nullptr));
    EXPECT_EQ(scale[0], 1024);
    EXPECT_EQ(scale[1], 3);
    EXPECT_EQ(words[12], 9);
}

TEST(ScalerDecode, RefusesNullAndShortStruct) {
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

// ---------------------------------------------------------------------------------------------------------- all-reduce
TEST(AllReduceValidation, NamesWrongTensorAndChangesNothing) {
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
            for (const InvalidTensor &invalid : kInvalidTensors) {
                std::vector<dsopt_tensor> list = good;
                invalid.apply(list[i]);
                if (list[i].data == nullptr || list[i].numel == good[i].numel + 1) continue; // both are valid here
                EXPECT_TRUE(refused(call(list), invalid.status, i == 0 ? "'0'" : "'1'"));
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

} // namespace refusals_arrays_tests
