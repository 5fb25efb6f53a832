// SPDX-License-Identifier: Apache-2.0
// Invalid input of the functions that create contexts, optimizers and groups. Each call returns the documented status
// and a text that names the invalid argument, and changes nothing.
#include "support/harness.h"
#include <csignal>
#include <functional>

using namespace test;

LABEL_FILE(one_thread);

namespace refusals_setup_tests {

constexpr double kInf = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------------- sizes of structs
/// The struct of a caller that was compiled with a later header.
template <class T> struct Larger {
    T known;
    unsigned char tail[24];
};

/// Calls with sizes below and above that of a valid struct. `from_caller`: the struct is an input.
template <class T>
void expect_growth(T good, const char *type, bool from_caller, const std::function<dsopt_status(T *)> &call) {
    for (const size_t size : {size_t(0), size_t(1), sizeof(size_t), size_t(16)}) {
        T small = good;
        small.size = size;
        EXPECT_TRUE(refused(call(&small), DSOPT_ERR_VERSION, std::string(type) + "|" + std::to_string(size)));
    }
    Larger<T> larger{good, {}};
    larger.known.size = sizeof larger;
    EXPECT_OK(call(&larger.known)) << type;
    for (size_t i = 0; i < sizeof larger.tail && from_caller; ++i) {
        larger = {good, {}};
        larger.known.size = sizeof larger;
        larger.tail[i] = 1;
        EXPECT_TRUE(
            refused(call(&larger.known), DSOPT_ERR_VERSION, std::string(type) + "|" + std::to_string(sizeof(T) + i)));
    }
    if (from_caller) return;
    std::memset(larger.tail, 0x5a, sizeof larger.tail); // the library writes only the members that it knows
    larger.known.size = sizeof larger;
    EXPECT_OK(call(&larger.known)) << type;
    EXPECT_EQ(larger.known.size, sizeof larger);
    for (const unsigned char byte : larger.tail) EXPECT_EQ(byte, 0x5a);
}

TEST(StructSizeValidation, AcceptsLargerStructsWithZeroTail) {
    const Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW));
    dsopt_optimizer *const opt = trainer.opt();
    expect_growth<dsopt_context_desc>(context_desc(), "dsopt_context_desc", true, [](dsopt_context_desc *desc) {
        dsopt_context *made = nullptr;
        const dsopt_status status = dsopt_context_create(desc, &made);
        EXPECT_EQ(made != nullptr, status == DSOPT_OK);
        dsopt_context_destroy(made);
        return status;
    });
    expect_growth<dsopt_optimizer_desc>(
        optimizer_desc(), "dsopt_optimizer_desc", true, [&](dsopt_optimizer_desc *desc) {
            dsopt_optimizer *made = nullptr;
            const dsopt_status status = dsopt_optimizer_create(trainer.own_context.get(), desc, &made);
            EXPECT_EQ(made != nullptr, status == DSOPT_OK);
            dsopt_optimizer_destroy(made);
            return status;
        });
    expect_growth<dsopt_group>(make_group(DSOPT_ALGORITHM_ADAMW), "dsopt_group", true,
                               [&](dsopt_group *group) { return dsopt_optimizer_add_group(opt, group, nullptr, 0); });
    expect_growth<dsopt_step>(trainer.arguments(), "dsopt_step", true,
                              [&](dsopt_step *step) { return dsopt_optimizer_step(opt, step); });
    DSOPT_NEW(dsopt_io, io);
    io.write = [](void *, const void *, size_t) { return 0; };
    expect_growth<dsopt_io>(io, "dsopt_io", true, [&](dsopt_io *io) { return dsopt_optimizer_save(opt, nullptr, io); });
    DSOPT_NEW(dsopt_state_info, info);
    expect_growth<dsopt_state_info>(info, "dsopt_state_info", false,
                                    [&](dsopt_state_info *info) { return dsopt_optimizer_state(opt, 0, info); });
    DSOPT_NEW(dsopt_report, report);
    expect_growth<dsopt_report>(report, "dsopt_report", false,
                                [&](dsopt_report *report) { return dsopt_optimizer_report(opt, report); });
    EXPECT_TRUE(refused(dsopt_optimizer_state(opt, 0, nullptr), DSOPT_ERR_ARGUMENT, "dsopt_state_info"));
    EXPECT_TRUE(refused(dsopt_optimizer_report(opt, nullptr), DSOPT_ERR_ARGUMENT, "dsopt_report"));
}

TEST(StructSizeValidation, GroupInitFillsLargerStruct) {
    Larger<dsopt_group> larger;
    std::memset(static_cast<void *>(&larger), 0x5a, sizeof larger);
    ASSERT_OK(dsopt_group_init(&larger.known, sizeof larger, DSOPT_ALGORITHM_LAMB));
    EXPECT_EQ(larger.known.size, sizeof larger);
    EXPECT_EQ(larger.known.max_trust, 10);
    for (const unsigned char byte : larger.tail) EXPECT_EQ(byte, 0);
    dsopt_group group{};
    EXPECT_TRUE(refused(dsopt_group_init(&group, 16, DSOPT_ALGORITHM_LAMB), DSOPT_ERR_VERSION, "dsopt_group|16"));
    EXPECT_EQ(group.size, 0u);
}

// --------------------------------------------------------------------------------------------- contexts and optimizers
LABEL(cpu); // the limits of some fields differ on CUDA
TEST(ContextValidation, RefusesEveryInvalidField) {
    struct Case {
        void (*change)(dsopt_context_desc &);
        dsopt_status status;
        const char *words;
    };
    const Case cases[] = {
        {[](auto &d) { d.backend = -1; }, DSOPT_ERR_ARGUMENT, "backend|-1"},
        {[](auto &d) { d.backend = 77; }, DSOPT_ERR_ARGUMENT, "backend|77"},
        {[](auto &d) { d.device = 1; }, DSOPT_ERR_ARGUMENT, "device|1"},
        {[](auto &d) { d.device = -1; }, DSOPT_ERR_ARGUMENT, "device|-1"},
        {[](auto &d) { d.threads = -1; }, DSOPT_ERR_ARGUMENT, "threads|-1"},
        {[](auto &d) { d.threads = INT32_MAX; }, DSOPT_ERR_ARGUMENT, "threads"},
        {[](auto &d) { d.log_level = -1; }, DSOPT_ERR_ARGUMENT, "log_level|-1"},
        {[](auto &d) { d.log_level = 5; }, DSOPT_ERR_ARGUMENT, "log_level|5"},
        {[](auto &d) { d.allocate = [](void *, size_t, size_t, void *) -> void * { return nullptr; }; },
         DSOPT_ERR_ARGUMENT, "allocate|release"},
        {[](auto &d) { d.release = [](void *, void *, size_t, void *) {}; }, DSOPT_ERR_ARGUMENT, "allocate|release"},
        {[](auto &d) { d.chunk = 1; }, DSOPT_ERR_ARGUMENT, "chunk|1"},
        {[](auto &d) { d.chunk = 4095; }, DSOPT_ERR_ARGUMENT, "chunk|4095"},
        {[](auto &d) { d.chunk = 4097; }, DSOPT_ERR_ARGUMENT, "chunk|4097"},
        {[](auto &d) { d.chunk = -4096; }, DSOPT_ERR_ARGUMENT, "chunk|-4096"},
        {[](auto &d) { d.chunk = INT64_MIN; }, DSOPT_ERR_ARGUMENT, "chunk"},
        {[](auto &d) { d.flags = 1u << 30; }, DSOPT_ERR_ARGUMENT, "flags|40000000"},
        {[](auto &d) { d.flags = DSOPT_CONTEXT_CHECK_POINTERS; }, DSOPT_ERR_UNSUPPORTED, "CHECK_POINTERS"},
        {[](auto &d) { d.reserved = 1; }, DSOPT_ERR_ARGUMENT, "reserved"},
    };
    for (const Case &c : cases) {
        dsopt_context_desc desc = context_desc();
        c.change(desc);
        dsopt_context *context = nullptr;
        EXPECT_TRUE(refused(dsopt_context_create(&desc, &context), c.status, c.words)) << c.words;
        EXPECT_EQ(context, nullptr);
    }
    EXPECT_TRUE(refused(dsopt_context_create(nullptr, nullptr), DSOPT_ERR_ARGUMENT, "ctx"));
}

TEST(ContextValidation, RefusesBackendThatIsNotBuilt) {
    const std::string info = dsopt_build_info();
    if (info.find("\"cuda\": \"cuda\"") != std::string::npos) GTEST_SKIP() << "the machine has a CUDA device";
    const bool built = info.find("\"cuda\": \"not in this build\"") == std::string::npos;
    dsopt_context_desc desc = context_desc();
    desc.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    EXPECT_TRUE(refused(dsopt_context_create(&desc, &context), built ? DSOPT_ERR_MISSING : DSOPT_ERR_UNSUPPORTED,
                        built ? "no CUDA device can be used here: " : "the CUDA backend is not in this build: "));
    EXPECT_NE(info.find("\"cuda_reason\": \""), std::string::npos) << info;
    EXPECT_EQ(context, nullptr);
}

TEST(ContextValidation, AcceptsHugeChunksAndManyThreads) {
    for (const int64_t chunk : {int64_t(1) << 40, INT64_MAX / 4096 * 4096}) {
        dsopt_context_desc desc = context_desc(4096);
        desc.chunk = chunk;
        desc.parallel_for = run_in_order;
        const Trainer trainer(shapes_of({100000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), desc),
            plain(shapes_of({100000}), make_group(DSOPT_ALGORITHM_ADAMW));
        trainer.train(1);
        plain.train(1);
        EXPECT_TRUE(same(trainer.text(), plain.text()));
    }
}

TEST(OptimizerValidation, RefusesEveryInvalidField) {
    struct Case {
        void (*change)(dsopt_optimizer_desc &);
        const char *words;
    };
    const Case cases[] = {
        {[](auto &d) { d.compat = 77; }, "compat|77"},
        {[](auto &d) { d.compat = -1; }, "compat|-1"},
        {[](auto &d) { d.flags = 1u << 30; }, "flags|40000000"},
        {[](auto &d) { d.flags = 1u << 31 | DSOPT_OPTIMIZER_NO_MASTER; }, "flags|80000001"},
        {[](auto &d) { d.nonfinite = 3; }, "nonfinite|3"},
        {[](auto &d) { d.nonfinite = -1; }, "nonfinite|-1"},
        {[](auto &d) { d.masters = 3; }, "masters|3"},
        {[](auto &d) { d.masters = -1; }, "masters|-1"},
        {[](auto &d) { d.max_value = -1; }, "max_value|-1"},
        {[](auto &d) { d.max_value = kInf; }, "max_value|inf"},
        {[](auto &d) { d.max_value = NAN; }, "max_value|nan"},
        {[](auto &d) { d.skip_budget = -1; }, "skip_budget|-1"},
        {[](auto &d) { d.expert_count = -1; }, "expert_count|-1"},
        {[](auto &d) { d.expert_count = 1; }, "expert"},
        {[](auto &d) { d.max_norm = -1; }, "max_norm|-1"},
        {[](auto &d) { d.max_norm = kInf; }, "max_norm|inf"},
        {[](auto &d) { d.max_norm = NAN; }, "max_norm|nan"},
    };
    const Context context = make_context();
    for (const Case &c : cases) {
        dsopt_optimizer_desc desc = optimizer_desc();
        c.change(desc);
        dsopt_optimizer *opt = nullptr;
        EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, c.words))
            << c.words;
        EXPECT_EQ(opt, nullptr);
    }
    dsopt_optimizer *opt = nullptr;
    EXPECT_TRUE(refused(dsopt_optimizer_create(nullptr, nullptr, &opt), DSOPT_ERR_ARGUMENT, "ctx"));
    EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), nullptr, nullptr), DSOPT_ERR_ARGUMENT, "opt"));
}

TEST(OptimizerValidation, RefusesNullHandles) {
    dsopt_context_destroy(nullptr);
    dsopt_optimizer_destroy(nullptr);
    int64_t count = 0;
    double value = 0;
    size_t bytes = 0;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    DSOPT_NEW(dsopt_step, step);
    DSOPT_NEW(dsopt_report, report);
    DSOPT_NEW(dsopt_state_info, info);
    const dsopt_status statuses[] = {dsopt_optimizer_add_group(nullptr, &group, nullptr, 0),
                                     dsopt_optimizer_set(nullptr, 0, DSOPT_KEY_LR, 1),
                                     dsopt_optimizer_get(nullptr, 0, DSOPT_KEY_LR, &value),
                                     dsopt_optimizer_count(nullptr, &count, &count),
                                     dsopt_optimizer_state_count(nullptr, &count),
                                     dsopt_optimizer_state(nullptr, 0, &info),
                                     dsopt_optimizer_export(nullptr, 0, &value, 8),
                                     dsopt_optimizer_import(nullptr, 0, &value, 8),
                                     dsopt_optimizer_bind(nullptr, DSOPT_BIND_PARAMS, nullptr, 0),
                                     dsopt_optimizer_reset(nullptr, 1, nullptr),
                                     dsopt_optimizer_step(nullptr, &step),
                                     dsopt_optimizer_apply(nullptr, &step),
                                     dsopt_optimizer_workspace(nullptr, &bytes),
                                     dsopt_optimizer_report(nullptr, &report),
                                     dsopt_optimizer_save(nullptr, "x", nullptr),
                                     dsopt_optimizer_load(nullptr, "x", nullptr)};
    for (size_t i = 0; i < std::size(statuses); ++i)
        EXPECT_TRUE(refused(statuses[i], DSOPT_ERR_ARGUMENT, "optimizer|NULL")) << i;
    const Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAM));
    EXPECT_TRUE(refused(dsopt_optimizer_state_count(trainer.opt(), nullptr), DSOPT_ERR_ARGUMENT, "count"));
    EXPECT_TRUE(refused(dsopt_optimizer_workspace(trainer.opt(), nullptr), DSOPT_ERR_ARGUMENT, "bytes"));
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), nullptr, nullptr, 0), DSOPT_ERR_ARGUMENT, "group"));
}

// -------------------------------------------------------------------------------------------------------------- groups
/// An optimizer with one group, after one step. A refused call must not change it.
class AddGroupValidation : public testing::Test {
protected:
    AddGroupValidation() : trainer_(shapes_of({50, 60, 70}), optimizer_desc(1.0)) {
        trainer_.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
        trainer_.train(1);
        before_ = state_bytes();
    }
    std::string state_bytes() {
        int64_t groups = 0, params = 0;
        must(dsopt_optimizer_count(trainer_.opt(), &groups, &params));
        return trainer_.text() + hyper_text(trainer_.opt()) + std::to_string(groups) + "/" + std::to_string(params);
    }
    void expect_refused(const dsopt_group &group, const std::vector<dsopt_param> &params, dsopt_status status,
                        const std::string &words) {
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer_.opt(), &group, params.data(), int64_t(params.size())),
                            status, words))
            << words;
        EXPECT_TRUE(same(state_bytes(), before_)) << words;
    }
    std::vector<dsopt_param> params() const { return trainer_.model.registered(1, 3); }
    void expect_param_refused(void (*change)(dsopt_param &), dsopt_status status, const std::string &words) {
        std::vector<dsopt_param> list = params();
        list[1].name = "layer.weight";
        change(list[1]);
        expect_refused(make_group(DSOPT_ALGORITHM_ADAM), list, status, words);
    }
    Trainer trainer_;
    std::string before_;
};

TEST_F(AddGroupValidation, RefusesHyperParametersOutOfRange) {
    struct Field {
        double dsopt_group::*field;
        const char *name;
        std::vector<double> bad;
    };
    const std::vector<double> always_invalid = {-1, -1e-300, 3.5e38, 1e300, kInf, -kInf, NAN};
    const Field fields[] = {{&dsopt_group::lr, "lr", {}},
                            {&dsopt_group::beta1, "beta1", {1, 1.5}},
                            {&dsopt_group::beta2, "beta2", {1, 1.5}},
                            {&dsopt_group::eps, "eps", {}},
                            {&dsopt_group::weight_decay, "weight_decay", {}},
                            {&dsopt_group::max_norm, "max_norm", {}}};
    for (const int32_t algorithm : kAlgorithms) {
        for (const Field &field : fields) {
            std::vector<double> bad = always_invalid;
            bad.insert(bad.end(), field.bad.begin(), field.bad.end());
            for (const double value : bad) {
                dsopt_group group = make_group(algorithm);
                group.*field.field = value;
                expect_refused(group, params(), DSOPT_ERR_ARGUMENT, field.name);
            }
        }
        for (double dsopt_group::*field : {&dsopt_group::min_trust, &dsopt_group::max_trust}) {
            std::vector<double> bad = always_invalid;
            bad.push_back(field == &dsopt_group::min_trust ? 10.5 : 0.001);
            for (const double value : bad) {
                dsopt_group group = make_group(algorithm);
                group.*field = value;
                expect_refused(group, params(),
                               algorithm == DSOPT_ALGORITHM_LAMB ? DSOPT_ERR_ARGUMENT : DSOPT_ERR_UNSUPPORTED, "trust");
            }
        }
    }
}

TEST_F(AddGroupValidation, RefusesUnsupportedOptions) {
    for (const int32_t algorithm : kAlgorithms) {
        expect_refused(make_group(algorithm, 0, 1u << 30), params(), DSOPT_ERR_ARGUMENT, "flags|40000000");
        if (algorithm == DSOPT_ALGORITHM_ADAM || algorithm == DSOPT_ALGORITHM_ADAMW)
            expect_refused(make_group(algorithm, 0, DSOPT_GROUP_EPS_INSIDE_SQRT), params(), DSOPT_ERR_UNSUPPORTED,
                           "eps_inside_sqrt");
        else
            expect_refused(make_group(algorithm, 0, DSOPT_GROUP_EPS_UNCORRECTED), params(), DSOPT_ERR_UNSUPPORTED,
                           "eps_uncorrected");
        expect_refused(make_group(algorithm, 0, DSOPT_GROUP_EPS_UNCORRECTED | DSOPT_GROUP_NO_BIAS_CORRECTION), params(),
                       DSOPT_ERR_UNSUPPORTED, "eps_uncorrected");
    }
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        expect_refused(make_group(algorithm, 0, DSOPT_GROUP_EPS_UNCORRECTED), params(), DSOPT_ERR_UNSUPPORTED,
                       "eps_uncorrected");
    for (const int32_t algorithm : {0, -1, 1000, INT32_MAX}) {
        dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
        group.algorithm = algorithm;
        expect_refused(group, params(), DSOPT_ERR_ARGUMENT, "algorithm|" + std::to_string(algorithm));
    }
}

TEST_F(AddGroupValidation, RefusesWrongLists) {
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer_.opt(), &group, params().data(), -1), DSOPT_ERR_ARGUMENT,
                        "count|-1"));
    EXPECT_TRUE(
        refused(dsopt_optimizer_add_group(trainer_.opt(), &group, nullptr, 2), DSOPT_ERR_ARGUMENT, "params|NULL"));
    EXPECT_TRUE(same(state_bytes(), before_));
}

TEST_F(AddGroupValidation, RefusesWrongTensors) {
    for (const int32_t dtype :
         {DSOPT_DTYPE_I32, DSOPT_DTYPE_F64, DSOPT_DTYPE_I16, DSOPT_DTYPE_U8, DSOPT_DTYPE_F8_E4M3}) {
        std::vector<dsopt_param> list = params();
        list[0].tensor.dtype = dtype;
        expect_refused(make_group(DSOPT_ALGORITHM_ADAM), list, DSOPT_ERR_DTYPE, "'p1'|dtype " + dtype_name(dtype));
    }
    for (const int32_t dtype : std::vector<int32_t>{0, -1, 9, 99, INT32_MAX}) {
        std::vector<dsopt_param> list = params();
        list[0].tensor.dtype = dtype;
        expect_refused(make_group(DSOPT_ALGORITHM_ADAM), list, DSOPT_ERR_DTYPE, "'p1'|dtype " + std::to_string(dtype));
    }
    expect_param_refused([](auto &p) { p.tensor.numel = -1; }, DSOPT_ERR_SHAPE, "'layer.weight'|-1");
    expect_param_refused([](auto &p) { p.tensor.numel = INT64_MIN; }, DSOPT_ERR_SHAPE, "'layer.weight'");
    expect_param_refused([](auto &p) { p.tensor.numel = INT64_MAX; }, DSOPT_ERR_SHAPE, "'layer.weight'|overflows");
    expect_param_refused([](auto &p) { p.tensor.numel = (int64_t(1) << 60) + 1; }, DSOPT_ERR_SHAPE,
                         "'layer.weight'|overflows");
    expect_param_refused([](auto &p) { p.tensor.reserved = 1; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|reserved");
    expect_param_refused([](auto &p) { p.flags = INT32_MIN; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|flags");
    expect_param_refused([](auto &p) { p.group = 1; }, DSOPT_ERR_ARGUMENT, "dsopt_param.group of parameter|is 1");
    expect_param_refused([](auto &p) { p.group = -1; }, DSOPT_ERR_ARGUMENT, "dsopt_param.group of parameter|is -1");
    expect_param_refused([](auto &p) { p.offset = -1; }, DSOPT_ERR_UNSUPPORTED, "'layer.weight'|offset|-1");
    expect_param_refused([](auto &p) { p.expert = -1; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|expert|-1");
    // The optimizer has no expert comm.
    expect_param_refused([](auto &p) { p.expert = 1; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|expert|1");
    for (int offset = 1; offset < 4; ++offset) {
        std::vector<dsopt_param> list = params();
        list[1].tensor.data = static_cast<char *>(list[1].tensor.data) + offset;
        --list[1].tensor.numel;
        expect_refused(make_group(DSOPT_ALGORITHM_ADAM), list, DSOPT_ERR_ALIGNMENT, "'p2'|aligned");
    }
    expect_param_refused(
        [](auto &p) {
            p.tensor = {static_cast<char *>(p.tensor.data) + 1, 10, DSOPT_DTYPE_BF16, 0};
        },
        DSOPT_ERR_ALIGNMENT, "'layer.weight'|2-byte");
}

TEST_F(AddGroupValidation, RefusesWrongDims) {
    static const int64_t seventy[] = {7, 10}, other[] = {7, 9}, negative[] = {-7, -10},
                         huge[] = {int64_t(1) << 40, int64_t(1) << 40};
    static const int64_t nine[] = {70, 1, 1, 1, 1, 1, 1, 1, 1}, zero[] = {0, 70};
    expect_param_refused([](auto &p) { p.dims = other, p.ndim = 2; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|63|70");
    expect_param_refused([](auto &p) { p.dims = zero, p.ndim = 2; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|70");
    expect_param_refused([](auto &p) { p.dims = negative, p.ndim = 2; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|-7");
    expect_param_refused([](auto &p) { p.dims = huge, p.ndim = 2; }, DSOPT_ERR_ARGUMENT, "'layer.weight'");
    expect_param_refused([](auto &p) { p.dims = nine, p.ndim = 9; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|ndim|9");
    expect_param_refused([](auto &p) { p.dims = seventy, p.ndim = -1; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|ndim|-1");
    expect_param_refused([](auto &p) { p.ndim = 2; }, DSOPT_ERR_ARGUMENT, "'layer.weight'|dims");
    std::vector<dsopt_param> list = params();
    list[1].dims = nine;
    list[1].ndim = 8;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    EXPECT_OK(dsopt_optimizer_add_group(trainer_.opt(), &group, list.data(), 2));
}

TEST_F(AddGroupValidation, RefusesWrongNames) {
    const auto with_name = [&](const std::string &name) {
        std::vector<dsopt_param> list = params();
        list[1].name = name.c_str();
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
        const dsopt_status status = dsopt_optimizer_add_group(trainer_.opt(), &group, list.data(), 2);
        EXPECT_TRUE(same(state_bytes(), before_)) << name;
        return status;
    };
    EXPECT_TRUE(refused(with_name(""), DSOPT_ERR_ARGUMENT, "name|2"));
    EXPECT_TRUE(refused(with_name(std::string(1001, 'x')), DSOPT_ERR_ARGUMENT, "name|1000"));
    EXPECT_TRUE(refused(with_name(std::string(5000, 'x')), DSOPT_ERR_ARGUMENT, "name|1000"));
    EXPECT_TRUE(refused(with_name("p0"), DSOPT_ERR_ARGUMENT, "two|'p0'")); // a name of the first group
    EXPECT_TRUE(refused(with_name("p1"), DSOPT_ERR_ARGUMENT, "two|'p1'")); // the default name of the other parameter
    const char *const not_utf8[] = {"\x80",
                                    "a\xff",
                                    "\xc0\xaf",
                                    "\xc1\x81",
                                    "\xe0\x80\x80",
                                    "\xe0\x9f\xbf",
                                    "\xed\xa0\x80",
                                    "\xed\xbf\xbf",
                                    "\xf0\x80\x80\x80",
                                    "\xf0\x8f\xbf\xbf",
                                    "\xf4\x90\x80\x80",
                                    "\xf5\x80\x80\x80",
                                    "\xc3",
                                    "\xe2\x82",
                                    "\xf0\x9f\x98",
                                    "\xc3(",
                                    "\xe2\x28\xa1"};
    for (const char *name : not_utf8) EXPECT_TRUE(refused(with_name(name), DSOPT_ERR_ARGUMENT, "name|2|UTF-8"));
}

TEST_F(AddGroupValidation, AcceptsUtf8NamesOfUpTo1000Bytes) {
    const std::string names[] = {
        std::string(1000, 'x'), "\xc3\xa9t\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf \xf4\x8f\xbf\xbf",
        "a\n\"\\\x01/.param",   "optimizer",
        "__metadata__",         "p7"};
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    for (const std::string &name : names) {
        const dsopt_param param = param_of({nullptr, 3, DSOPT_DTYPE_F32, 0}, name.c_str());
        EXPECT_OK(dsopt_optimizer_add_group(trainer_.opt(), &group, &param, 1));
    }
}

TEST_F(AddGroupValidation, RefusesOverlapInListAndWithOldParams) {
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    const auto expect_overlap = [&](void *data, int64_t numel, const char *words) {
        std::vector<dsopt_param> list = params();
        list[1].tensor.data = data;
        list[1].tensor.numel = numel;
        expect_refused(group, list, DSOPT_ERR_OVERLAP, words);
    };
    float *const first = trainer_.model.params[0].as<float>(), *const second = trainer_.model.params[1].as<float>();
    expect_overlap(second, 60, "'p1'|'p2'");
    expect_overlap(second + 59, 1, "'p1'|'p2'");
    expect_overlap(second + 20, 10, "'p1'|'p2'");
    expect_overlap(second - 1, 2, "'p1'|'p2'");
    expect_overlap(first, 1, "'p0'|'p2'");
    expect_overlap(first + 49, 1, "'p0'|'p2'");
    // State that the engine allocated.
    expect_overlap(state_info(trainer_.opt(), 1).tensor.data, 1, "exp_avg_sq|'p0'|'p2'");
    // Adjacent tensors do not overlap, and an empty tensor overlaps nothing.
    std::vector<dsopt_param> list = {params()[0], params()[0], params()[0]};
    list[0].tensor.numel = 30;
    list[1].tensor.numel = 30;
    list[1].tensor.data = second + 30;
    list[2].tensor.numel = 0;
    EXPECT_OK(dsopt_optimizer_add_group(trainer_.opt(), &group, list.data(), 3));
}

// The reference compares every pair of tensors.
TEST(AddGroupOverlap, AgreesWithPairwiseComparison) {
    const Context context = make_context();
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    const Array memory(DSOPT_DTYPE_F32, 200, 0);
    Random random(3);
    int overlapping = 0;
    for (int round = 0; round < 2000; ++round) {
        std::vector<dsopt_param> list(2 + random.below(6));
        for (dsopt_param &param : list)
            param = param_of({memory.as<float>() + random.below(190), int64_t(random.below(9)), DSOPT_DTYPE_F32, 0});
        bool overlap = false;
        for (size_t i = 0; i < list.size(); ++i)
            for (size_t k = 0; k < i; ++k) {
                const auto *a = static_cast<float *>(list[i].tensor.data),
                           *b = static_cast<float *>(list[k].tensor.data);
                const int64_t n = list[i].tensor.numel, m = list[k].tensor.numel;
                overlap = overlap || (n > 0 && m > 0 && a < b + m && b < a + n);
            }
        const Optimizer opt = make_optimizer(context);
        EXPECT_EQ(dsopt_optimizer_add_group(opt.get(), &group, list.data(), int64_t(list.size())),
                  overlap ? DSOPT_ERR_OVERLAP : DSOPT_OK);
        overlapping += overlap;
    }
    EXPECT_GT(overlapping, 200);
    EXPECT_LT(overlapping, 1800);
}

// ----------------------------------------------------------------------------------------- sums of sizes that overflow
// The tests run in child processes: after an overflow, the library would read or write out of bounds.
LABEL(cpu); // CUDA does not work in a child of fork()
TEST(AddGroupDeathTest, RefusesHugeCountBeforeReadingList) {
    const auto run = [](int64_t count) {
        const Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAM));
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
        const dsopt_param param = param_of({nullptr, 1, DSOPT_DTYPE_F32, 0});
        _exit(dsopt_optimizer_add_group(trainer.opt(), &group, &param, count) == DSOPT_ERR_SHAPE ? 0 : 1);
    };
    EXPECT_EXIT(run(INT64_MAX), testing::ExitedWithCode(0), "");
    EXPECT_EXIT(run(int64_t(1) << 31), testing::ExitedWithCode(0), "");
}

// Each size is valid, but their sum exceeds 2^64: the engine would allocate far too little memory. Either the call that
// adds the group or the allocation of the state must fail.
LABEL(cpu); // CUDA does not work in a child of fork()
TEST(AddGroupDeathTest, ReportsOverflowOfStateSize) {
    const auto run = [] {
        dsopt_context_desc desc = context_desc();
        desc.allocate = [](void *, size_t bytes, size_t alignment, void *) -> void * {
            return bytes > (size_t(1) << 30) ? nullptr : std::aligned_alloc(alignment, (bytes + 63) / 64 * 64);
        };
        desc.release = [](void *, void *memory, size_t, void *) { std::free(memory); };
        const Context context = make_context(desc);
        const Optimizer opt = make_optimizer(context);
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
        const dsopt_param huge = param_of({nullptr, int64_t(1) << 60, DSOPT_DTYPE_F32, 0});
        const dsopt_param list[] = {huge, huge};
        const dsopt_status added = dsopt_optimizer_add_group(opt.get(), &group, list, 2);
        if (added != DSOPT_OK) _exit(added == DSOPT_ERR_SHAPE ? 0 : 1);
        if (report_of(opt.get()).state_bytes < 0) _exit(2);
        int32_t counters[2];
        _exit(dsopt_optimizer_export(opt.get(), state_count(opt.get()) - 1, counters, sizeof counters) ==
                      DSOPT_ERR_NOMEM
                  ? 0
                  : 3);
    };
    EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST(AddGroupSizes, RefusesTooManyElementsInTotal) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_SGD);
    const dsopt_param large = param_of({nullptr, int64_t(1) << 55, DSOPT_DTYPE_F32, 0});
    const dsopt_param list[] = {large, large, param_of({nullptr, 1, DSOPT_DTYPE_F32, 0}, "last")};
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(opt.get(), &group, list, 3), DSOPT_ERR_SHAPE, "'last'|2^56"));
    EXPECT_OK(dsopt_optimizer_add_group(opt.get(), &group, list, 2));
}

// -------------------------------------------------------------------------------------------------------- 1-bit family
TEST(OneBitGroupValidation, RequiresOneScheduleAndTrustRule) {
    const Context context = make_context();
    const Array first(DSOPT_DTYPE_F32, 5, 1), second(DSOPT_DTYPE_F32, 5, 1);
    const Trainer trainer(context, optimizer_desc(), make_group(DSOPT_ALGORITHM_ONEBIT_LAMB),
                          std::vector<Array>{first});
    const dsopt_param param = param_of(second.tensor());
    const auto expect_refused = [&](dsopt_status status, const char *words, const auto &change) {
        dsopt_group group = make_group(DSOPT_ALGORITHM_ONEBIT_LAMB);
        change(group);
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), status, words)) << words;
    };
    expect_refused(DSOPT_ERR_ARGUMENT, "freeze_step", [](dsopt_group &group) { group.freeze_step += 1; });
    expect_refused(DSOPT_ERR_ARGUMENT, "trust_beta", [](dsopt_group &group) { group.trust_beta = 0.5; });
    expect_refused(DSOPT_ERR_ARGUMENT, "_max_change", [](dsopt_group &group) { group.trust_max_change *= 2; });
    expect_refused(DSOPT_ERR_UNSUPPORTED, "one algorithm of the 1-bit family",
                   [](dsopt_group &group) { group = make_group(DSOPT_ALGORITHM_ONEBIT_ADAM); });
    const dsopt_group good = make_group(DSOPT_ALGORITHM_ONEBIT_LAMB);
    EXPECT_OK(dsopt_optimizer_add_group(trainer.opt(), &good, &param, 1));
}

// ------------------------------------------------------------------------------------------------------------- results
TEST(NormValidation, RefusesMisalignedResult) {
    const Context context = make_context();
    const Array values(DSOPT_DTYPE_F32, 5, 1);
    const dsopt_tensor list[] = {values.tensor()};
    alignas(8) char memory[sizeof(dsopt_norm_result) + 8] = {};
    EXPECT_TRUE(refused(dsopt_tensors_norm(context.get(), list, 1, DSOPT_NORM_L2, 0, nullptr,
                                           reinterpret_cast<dsopt_norm_result *>(memory + 4), nullptr),
                        DSOPT_ERR_ALIGNMENT, "result|8 bytes"));
}

} // namespace refusals_setup_tests
