// SPDX-License-Identifier: Apache-2.0
// A load refuses checkpoints that do not match the optimizer, are inconsistent or are damaged, and changes nothing. The
// tests create files with valid checksums by the library's own writer, so this program links the static library.
#include "base/status.h"
#include "base/text.h"
#include "content.h"
#include <functional>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_refusals_tests {

/// An optimizer after three steps, and its checkpoint after two of them.
class Load : public testing::Test {
protected:
    static constexpr int64_t kDims[2] = {4, 5};
    Load() : trainer_(shapes(), optimizer_desc(0.5)) {
        auto list = trainer_.model.registered();
        list[0].dims = kDims;
        list[0].ndim = 2;
        const dsopt_group a = make_group(DSOPT_ALGORITHM_ADAMW), b = make_group(DSOPT_ALGORITHM_LAMB);
        must(dsopt_optimizer_add_group(trainer_.opt(), &a, list.data(), 2));
        must(dsopt_optimizer_add_group(trainer_.opt(), &b, list.data() + 2, 1));
        step(1);
        step(2);
        data_ = saved(trainer_.opt(), DSOPT_IO_PARAMS);
        step(3);
        must(dsopt_optimizer_set(trainer_.opt(), 0, DSOPT_KEY_LR, 0.5));
        before_ = state_bytes();
    }
    static std::vector<Shape> shapes() {
        return {{20, DSOPT_DTYPE_F32}, {6, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16}, {3, DSOPT_DTYPE_F32}};
    }
    void step(uint64_t t) {
        trainer_.model.make_gradients(t);
        dsopt_step step = trainer_.arguments();
        step.count = 3;
        must(trainer_.step(step));
    }
    std::string state_bytes() const {
        return trainer_.text() + hyper_text(trainer_.opt()) + std::to_string(report_of(trainer_.opt()).calls);
    }
    void expect_refused(const std::string &data, dsopt_status status, const std::string &words, uint32_t flags = 0) {
        EXPECT_TRUE(refused(load(trainer_.opt(), data, flags), status, words)) << words;
        EXPECT_TRUE(same(state_bytes(), before_)) << words;
    }
    void expect_change_refused(const std::function<void(Content &)> &change, dsopt_status status,
                               const std::string &words, uint32_t flags = 0) {
        Content content(data_);
        change(content);
        expect_refused(content.text(), status, words, flags);
    }
    Trainer trainer_;
    std::string data_, before_;
};

TEST_F(Load, AcceptsOwnAndRewrittenFile) {
    for (const std::string &data : {data_, Content(data_).text()}) {
        EXPECT_OK(load(trainer_.opt(), data, DSOPT_IO_PARAMS));
        EXPECT_FALSE(same(state_bytes(), before_));
        step(3);
        must(dsopt_optimizer_set(trainer_.opt(), 0, DSOPT_KEY_LR, 0.5));
        EXPECT_TRUE(same(state_bytes(), before_));
    }
}

TEST_F(Load, RefusesFileOfDifferentOptimizer) {
    struct Other {
        std::vector<Shape> shapes;
        std::vector<std::pair<int32_t, size_t>> groups;
        std::vector<const char *> names;
        const char *words;
    };
    const std::vector<Shape> good = shapes();
    const auto with = [&](size_t i, const Shape &shape) {
        std::vector<Shape> list = good;
        list[i] = shape;
        return list;
    };
    const Other others[] = {
        {good, {{DSOPT_ALGORITHM_ADAM, 2}, {DSOPT_ALGORITHM_LAMB, 1}}, {"p0", "p1", "p2"}, "group 0|adam|adamw"},
        {good,
         {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_ADAM_LEGACY, 1}},
         {"p0", "p1", "p2"},
         "group 1|adam_legacy|lamb"},
        {good, {{DSOPT_ALGORITHM_ADAMW, 3}}, {"p0", "p1", "p2"}, "1 groups|2"},
        {good,
         {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 1}, {DSOPT_ALGORITHM_LAMB, 0}},
         {"p0", "p1", "p2"},
         "3 groups|2"},
        {good, {{DSOPT_ALGORITHM_ADAMW, 1}, {DSOPT_ALGORITHM_LAMB, 2}}, {"p0", "p1", "p2"}, "\"p1\"|group 1|group 0"},
        {good, {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 1}}, {"p0", "other", "p2"}, "\"other\""},
        {good, {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 1}}, {"p1", "p0", "p2"}, "\"p0."},
        {with(0, {21, DSOPT_DTYPE_F32}),
         {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 1}},
         {"p0", "p1", "p2"},
         "\"p0.exp_avg\"|84|80"},
        {with(1, {6, DSOPT_DTYPE_F32}),
         {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 1}},
         {"p0", "p1", "p2"},
         "\"p1.master\""},
        {{good[0], good[1]}, {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 0}}, {"p0", "p1"}, "\"p2\""},
        {{good[0], good[1], good[2], {5}},
         {{DSOPT_ALGORITHM_ADAMW, 2}, {DSOPT_ALGORITHM_LAMB, 2}},
         {"p0", "p1", "p2", "more"},
         "\"more\""},
    };
    for (const Other &other : others) {
        const Model model(other.shapes);
        const Context context = make_context();
        const Optimizer opt = make_optimizer(context);
        auto list = model.registered();
        for (size_t i = 0; i < list.size(); ++i) list[i].name = other.names[i];
        size_t begin = 0;
        for (const auto &[algorithm, count] : other.groups) {
            const dsopt_group group = make_group(algorithm);
            must(dsopt_optimizer_add_group(opt.get(), &group, list.data() + begin, int64_t(count)));
            begin += count;
        }
        expect_refused(saved(opt.get()), DSOPT_ERR_MISMATCH, other.words);
    }
}

TEST_F(Load, EscapesFileTextInMessages) {
    std::string hostile = "\x1b]0;title\x07\x1b[31m";
    for (int i = 0; i < 300; ++i) hostile += "\xc3\xa9"; // two bytes per character
    const std::string names = std::to_string(hostile.size()) + ":" + hostile + "2:p12:p2";
    const std::pair<const char *, std::string> fields[] = {
        {"group.0.algorithm", hostile}, {"params", names},  {"format", hostile},
        {"format_version", hostile},    {"calls", hostile}, {"ranks", hostile},
        {"group.0.lr", hostile}};
    for (const auto &[key, value] : fields) {
        Content content(data_);
        content.field(key) = value;
        EXPECT_NE(load(trainer_.opt(), content.text()), DSOPT_OK) << key;
        const std::string text = dsopt_last_error();
        EXPECT_TRUE(dsopt::is_text(text)) << key;
        for (const char c : text) EXPECT_FALSE((c >= 0 && c < 0x20) || c == 0x7f) << key << ": " << int(c);
    }
}

TEST(Error, TruncatesTextAtCharacterBoundary) {
    for (const char *character : {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"})
        for (size_t shift = 0; shift < 4; ++shift) {
            std::string text(shift, 'x');
            for (int i = 0; i < 600; ++i) text += character;
            const dsopt::Error error(DSOPT_ERR_STATE, "%s", text.c_str());
            EXPECT_TRUE(dsopt::is_text(error.what()));
            EXPECT_GT(std::strlen(error.what()), 500u);
        }
}

TEST_F(Load, RefusesTooLongHeaderBeforeReadingIt) {
    struct Reader {
        uint64_t length, taken = 0;
        static int read(void *user, uint64_t offset, void *data, uint64_t bytes) {
            auto *const self = static_cast<Reader *>(user);
            std::memset(data, ' ', bytes);
            if (offset == 0) std::memcpy(data, &self->length, std::min<uint64_t>(bytes, sizeof self->length));
            self->taken += bytes;
            return 0;
        }
    };
    const auto read_bytes = [&](uint64_t length) {
        Reader reader{length};
        DSOPT_NEW(dsopt_io, io);
        io.user = &reader;
        io.read = Reader::read;
        io.total = 200'000'000;
        EXPECT_EQ(dsopt_optimizer_load(trainer_.opt(), nullptr, &io), DSOPT_ERR_FORMAT);
        return reader.taken;
    };
    EXPECT_EQ(read_bytes(99'999'999), 8u);
    const std::string text = dsopt_last_error(), most = "at most ";
    ASSERT_NE(text.find(most), std::string::npos) << text;
    const uint64_t longest = std::stoull(text.substr(text.find(most) + most.size()));
    EXPECT_LT(longest, 1u << 20) << "the optimizer has three parameters";
    EXPECT_EQ(read_bytes(longest + 1), 8u);
    EXPECT_GE(read_bytes(longest), longest);
    EXPECT_TRUE(same(state_bytes(), before_));
}

TEST_F(Load, RefusesMomentsOfAnotherDtype) {
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER);
    desc.compat = DSOPT_COMPAT_DEEPSPEED; // moments in the parameter's dtype
    const Trainer half(shapes_of({6}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW), desc);
    const Trainer full(shapes_of({6}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW),
                       optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER));
    EXPECT_TRUE(refused(load(full.opt(), saved(half.opt())), DSOPT_ERR_MISMATCH, "\"p0.exp_avg\"|dtype"));
    EXPECT_TRUE(refused(load(half.opt(), saved(full.opt())), DSOPT_ERR_MISMATCH, "\"p0.exp_avg\"|dtype"));
}

TEST_F(Load, RefusesMissingTensorsOfEachKind) {
    for (const char *name : {"p0.exp_avg", "p2.exp_avg_sq", "p1.master", "optimizer.step", "optimizer.trust_ratio"})
        expect_change_refused([&](Content &c) { c.drop_tensor(name); }, DSOPT_ERR_MISMATCH, name);
    expect_change_refused([](Content &c) { c.drop_tensor("p1.param"); }, DSOPT_ERR_MISMATCH, "p1.param",
                          DSOPT_IO_PARAMS);
    Content without(data_); // tensors that the flags exclude may be missing
    for (const char *name : {"p0.param", "p1.param", "p2.param"}) without.drop_tensor(name);
    EXPECT_OK(load(trainer_.opt(), without.text()));
    without.drop_tensor("p1.master");
    EXPECT_OK(load(trainer_.opt(), without.text(), DSOPT_IO_NO_MASTERS));
}

TEST_F(Load, RefusesTensorsOfAnotherDtypeSizeOrShape) {
    expect_change_refused([](Content &c) { c.tensor("p0.exp_avg").dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_MISMATCH,
                          "p0.exp_avg|dtype");
    expect_change_refused([](Content &c) { c.tensor("optimizer.step").dtype = DSOPT_DTYPE_F32; }, DSOPT_ERR_MISMATCH,
                          "optimizer.step|dtype");
    expect_change_refused(
        [](Content &c) {
            c.tensor("p0.exp_avg").shape = {5, 4};
        },
        DSOPT_ERR_MISMATCH, "p0.exp_avg|shape");
    expect_change_refused(
        [](Content &c) {
            dsopt::TensorEntry &entry = c.tensor("p2.exp_avg");
            entry.shape = {2};
            entry.bytes = 8;
        },
        DSOPT_ERR_MISMATCH, "p2.exp_avg|8|12");
    Content flat(data_); // a flat shape of the same size is valid
    flat.tensor("p0.exp_avg").shape = {20};
    EXPECT_OK(load(trainer_.opt(), flat.text()));
}

TEST_F(Load, RefusesEveryMissingField) {
    for (const auto &entry : Content(data_).metadata) {
        const std::string &key = entry.first;
        if (key.starts_with("xxh3")) continue;
        expect_change_refused(
            [&](Content &c) { std::erase_if(c.metadata, [&](const auto &field) { return field.first == key; }); },
            DSOPT_ERR_FORMAT, key);
    }
}

TEST_F(Load, RefusesFieldsOutOfRange) {
    struct Field {
        const char *key;
        std::vector<const char *> values;
    };
    const std::vector<const char *> no_number = {"", " 1", "1 ", "0x10", "1,5", "one", "--1"};
    const Field fields[] = {{"group.0.lr", {"nan", "inf", "-1", "-inf", "1e999"}},
                            {"group.0.beta1", {"nan", "1", "-0.1", "inf"}},
                            {"group.1.beta2", {"nan", "1", "-0.1"}},
                            {"group.1.eps", {"nan", "inf", "-1"}},
                            {"group.0.weight_decay", {"nan", "inf", "-1"}},
                            {"group.0.max_norm", {"nan", "inf", "-1"}},
                            {"group.1.min_trust", {"nan", "inf", "-1", "11"}},
                            {"group.1.max_trust", {"nan", "inf", "-1", "0"}},
                            {"group.0.min_trust", {"0.5", "nan"}},
                            {"group.0.flags", {"2", "8", "32", "1073741824", "-1", "1.5", "99999999999"}},
                            {"max_norm", {"nan", "inf", "-1"}},
                            {"max_value", {"nan", "inf", "-1"}},
                            {"calls", {"-1", "1.5", "nan", "99999999999999999999", "9007199254740993"}},
                            {"format", {"pt", "DSOPT"}}};
    for (const Field &field : fields) {
        std::vector<const char *> values = field.values;
        values.insert(values.end(), no_number.begin(), no_number.end());
        for (const char *value : values)
            expect_change_refused([&](Content &c) { c.field(field.key) = value; }, DSOPT_ERR_FORMAT, "");
    }
    expect_change_refused([](Content &c) { c.field("group.0.beta1") = "nan"; }, DSOPT_ERR_FORMAT, "group 0|beta1");
    expect_change_refused([](Content &c) { c.field("group.1.eps") = "x"; }, DSOPT_ERR_FORMAT, "group.1.eps|x");
    for (const char *value : {"0", "1", "3", "-2", "x", "4294967298"})
        EXPECT_NE(load(trainer_.opt(),
                       [&] {
                           Content content(data_);
                           content.field("groups") = value;
                           return content.text();
                       }()),
                  DSOPT_OK);
    EXPECT_TRUE(same(state_bytes(), before_));
}

TEST_F(Load, RefusesOtherFormatVersionsAndNamesItsOwn) {
    const std::string now = Content(data_).field("format_version");
    for (const char *version : {"2", "10", "0", "1.1", "", "01"}) {
        if (version == now) continue;
        expect_change_refused([&](Content &c) { c.field("format_version") = version; }, DSOPT_ERR_FORMAT,
                              "version|" + now);
    }
}

TEST_F(Load, RefusesDamagedListOfNames) {
    const std::string good = Content(data_).field("params");
    ASSERT_EQ(good, "2:p02:p12:p2");
    for (const char *value : {"", "2:p0", "2:p02:p1", "2:p02:p12:p22:p3", "2:p02:p02:p2", "2:p02:p1:p2", "3:p02:p12:p2",
                              "99:p0", "-1:p0", "18446744073709551615:p0", "99999999999999999999:p0", "2p02:p12:p2",
                              "2:p02:p12:p2x", "2:p22:p12:p0", "0:2:p02:p12:p2"}) {
        Content content(data_);
        content.field("params") = value;
        const dsopt_status status = load(trainer_.opt(), content.text());
        EXPECT_TRUE(status == DSOPT_ERR_FORMAT || status == DSOPT_ERR_MISMATCH)
            << value << ": " << dsopt_status_name(status);
        EXPECT_TRUE(same(state_bytes(), before_)) << value;
    }
}

// Numbers of parameters per group that contradict the list of names, and numbers whose sum overflows.
TEST_F(Load, RefusesWrongGroupSizes) {
    struct Sizes {
        const char *first, *second;
    };
    for (const auto &[first, second] : {Sizes{"1", "2"},
                                        {"3", "0"},
                                        {"0", "3"},
                                        {"-1", "4"},
                                        {"2", "-1"},
                                        {"2", "9"},
                                        {"2", "0"},
                                        {"-9223372036854775808", "-1"},
                                        {"9223372036854775807", "1"},
                                        {"9223372036854775807", "9223372036854775807"}}) {
        Content content(data_);
        content.field("group.0.params") = first;
        content.field("group.1.params") = second;
        const dsopt_status status = load(trainer_.opt(), content.text());
        EXPECT_TRUE(status == DSOPT_ERR_FORMAT || status == DSOPT_ERR_MISMATCH)
            << first << " " << second << ": " << dsopt_status_name(status);
        EXPECT_TRUE(same(state_bytes(), before_));
        before_ = state_bytes();
    }
}

TEST_F(Load, RefusesDamagedListOfGroups) {
    const auto with = [&](const char *value) {
        return [=](Content &c) { c.metadata.emplace_back("param_groups", value); };
    };
    for (const char *value :
         {"0,0,2,", "0,0,0,", "0,1,1,", "0,0,1", "x,0,1,", "-1,0,1,", "0,,1,", ",", "0,0,18446744073709551616,"})
        expect_change_refused(with(value), DSOPT_ERR_FORMAT, "param_groups|damaged");
    for (const char *value : {"", "0,0,", "0,"}) expect_change_refused(with(value), DSOPT_ERR_FORMAT, "parameters");
    // The list matches the names, but one group states a larger size.
    expect_change_refused(
        [&](Content &c) {
            with("0,0,1,")(c);
            c.field("group.0.params") = "3";
        },
        DSOPT_ERR_MISMATCH, "group 0|3 parameters|2");
}

TEST_F(Load, RefusesInvalidRanks) {
    for (const auto &[rank, ranks] : {std::pair{"1", "1"}, {"-1", "1"}, {"0", "0"}, {"0", "-2"}, {"0", "2147483647"}})
        expect_change_refused(
            [&, r = rank, n = ranks](Content &c) {
                c.field("rank") = r;
                c.field("ranks") = n;
            },
            DSOPT_ERR_FORMAT, "is of rank");
    for (const char *nodes : {"0", "-1", "2"})
        expect_change_refused([&](Content &c) { c.metadata.emplace_back("node_ranks", nodes); }, DSOPT_ERR_FORMAT,
                              "in nodes of");
}

TEST_F(Load, RefusesInconsistentFilesOfRanks) {
    const auto expect_pair_refused = [&](const char *words, const std::function<void(Content &)> &change) {
        std::array<Content, 2> both = {Content(data_), Content(data_)};
        for (int rank = 0; rank < 2; ++rank) {
            both[size_t(rank)].field("rank") = std::to_string(rank);
            both[size_t(rank)].field("ranks") = "2";
        }
        change(both[1]);
        const MemoryFile first{both[0].text()}, second{both[1].text()};
        EXPECT_TRUE(refused(load_all(trainer_.opt(), {&first, &second}), DSOPT_ERR_MISMATCH, words)) << words;
        EXPECT_TRUE(same(state_bytes(), before_)) << words;
    };
    expect_pair_refused("file 1|nodes of 2", [](Content &c) { c.metadata.emplace_back("node_ranks", "2"); });
    expect_pair_refused("different saves|calls", [](Content &c) { c.field("calls") = "7"; });
    expect_pair_refused("no tensor \"p0.exp_avg\"", [](Content &c) { c.drop_tensor("p0.exp_avg"); });
    expect_pair_refused("not the same|p0.exp_avg", [](Content &c) { c.bytes[0][0] ^= 1; });
}

TEST(LoadFields, RefusesInvalidScalerAndAccumulator) {
    const Context context = make_context();
    const Scaler scaler = make_scaler(context, 64);
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_ACCUMULATE);
    desc.scaler = scaler.get();
    const Array weight(DSOPT_DTYPE_F32, 8, 1);
    const Trainer trainer(context, desc, make_group(DSOPT_ALGORITHM_ADAMW), std::vector<Array>{weight});
    const std::string data = saved(trainer.opt()), before = state_text(trainer.opt());
    for (const auto &[key, value] : {std::pair{"scaler.flags", "1073741824"},
                                     {"scaler.window", "0"},
                                     {"scaler.factor", "1"},
                                     {"scaler.factor", "nan"},
                                     {"scaler.min", "-1"},
                                     {"accumulated", ""},
                                     {"accumulated", "00"}}) {
        Content content(data);
        content.field(key) = value;
        EXPECT_TRUE(refused(load(trainer.opt(), content.text()), DSOPT_ERR_FORMAT)) << key << " " << value;
        EXPECT_TRUE(same(state_text(trainer.opt()), before));
    }
    EXPECT_OK(load(trainer.opt(), data));
}

TEST(LoadFields, RefusesDifferentOneBitFlagsOrOrder) {
    const std::vector<Shape> shapes = {{20}, {20}};
    const Trainer trainer(shapes, make_group(DSOPT_ALGORITHM_ONEBIT_ADAM));
    const std::string data = saved(trainer.opt());
    Content flags(data), order(data);
    flags.field("group.0.flags") = std::to_string(DSOPT_GROUP_NON_FREEZE);
    order.field("params") = "2:p12:p0";
    EXPECT_TRUE(refused(load(trainer.opt(), flags.text()), DSOPT_ERR_MISMATCH, "group 0|NON_FREEZE"));
    EXPECT_TRUE(refused(load(trainer.opt(), order.text()), DSOPT_ERR_MISMATCH, "another order"));
    EXPECT_OK(load(trainer.opt(), data));
}

TEST(LoadFields, RefusesOneBitGroupsWithUnequalSchedules) {
    Trainer trainer({{20}, {20}}, optimizer_desc());
    const auto list = trainer.model.registered();
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ONEBIT_LAMB);
    for (const auto &param : list) must(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1));
    const auto step = [&](uint64_t t) {
        trainer.model.make_gradients(t);
        dsopt_step step = trainer.arguments();
        step.count = 2;
        must(trainer.step(step));
    };
    step(1);
    const std::string data = saved(trainer.opt());
    step(2);
    const std::string before = trainer.text() + hyper_text(trainer.opt());
    for (const auto &[key, value] :
         {std::pair{"group.0.freeze_step", "7"}, {"group.1.freeze_step", "7"}, {"group.1.trust_beta", "0.5"}}) {
        Content content(data);
        content.field(key) = value;
        EXPECT_TRUE(refused(load(trainer.opt(), content.text()), DSOPT_ERR_FORMAT, "groups|the same")) << key;
        EXPECT_TRUE(same(trainer.text() + hyper_text(trainer.opt()), before)) << key;
    }
    EXPECT_OK(load(trainer.opt(), data));
}

TEST(LoadBeforeFirstStep, RefusesMasterWithoutParameterMemory) {
    const std::vector<Shape> shapes = shapes_of({30}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Trainer source(shapes, make_group(DSOPT_ALGORITHM_ADAMW)), trainer(shapes, optimizer_desc());
    auto list = trainer.model.registered();
    list[0].tensor.data = nullptr;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    must(dsopt_optimizer_add_group(trainer.opt(), &group, list.data(), 1));
    const std::string data = saved(source.opt(), DSOPT_IO_PARAMS);
    EXPECT_TRUE(refused(load(trainer.opt(), data, DSOPT_IO_NO_MASTERS), DSOPT_ERR_STATE, "'p0'|master"));
    EXPECT_TRUE(refused(load(trainer.opt(), data, DSOPT_IO_PARAMS), DSOPT_ERR_STATE, "'p0'|load into"));
    EXPECT_OK(load(trainer.opt(), data));
}

// -------------------------------------------------------------------------------------------------------------- damage
TEST_F(Load, RefusesEveryBitFlip) {
    ASSERT_LT(data_.size(), 6000u);
    std::string data = data_;
    int checksum = 0, format = 0;
    for (size_t bit = 0; bit < data.size() * 8; ++bit) {
        data[bit / 8] = char(data[bit / 8] ^ (1 << bit % 8));
        const dsopt_status status = load(trainer_.opt(), data, DSOPT_IO_PARAMS);
        ASSERT_TRUE(status == DSOPT_ERR_FORMAT || status == DSOPT_ERR_CHECKSUM)
            << bit << " " << dsopt_status_name(status);
        if (bit % 97 == 0) { ASSERT_TRUE(same(state_bytes(), before_)) << bit; }
        (status == DSOPT_ERR_FORMAT ? format : checksum) += 1;
        data[bit / 8] = data_[bit / 8];
    }
    EXPECT_TRUE(same(state_bytes(), before_));
    EXPECT_GT(checksum, 1000);
    EXPECT_GT(format, 10000);
}

TEST_F(Load, NamesDamagedTensorEvenIfNotLoaded) {
    std::string data = data_;
    data.back() = char(data.back() ^ 1);
    const std::string last = Content(data_).tensors.back().name;
    for (const uint32_t flags : {0u, uint32_t(DSOPT_IO_PARAMS), uint32_t(DSOPT_IO_NO_STATE),
                                 uint32_t(DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_STATE)})
        expect_refused(data, DSOPT_ERR_CHECKSUM, last, flags);
}

TEST_F(Load, RefusesEveryTruncationAndAppendedBytes) {
    for (size_t size = 0; size < data_.size(); ++size) {
        ASSERT_EQ(load(trainer_.opt(), data_.substr(0, size)), DSOPT_ERR_FORMAT) << size;
        if (size % 97 == 0) { ASSERT_TRUE(same(state_bytes(), before_)) << size; }
    }
    expect_refused(data_ + '\0', DSOPT_ERR_FORMAT, "appended");
    expect_refused(data_ + data_, DSOPT_ERR_FORMAT, "appended");
}

TEST_F(Load, RefusesWrongLengths) {
    for (const uint64_t length : {uint64_t(1) << 63, UINT64_MAX, UINT64_MAX - 7, uint64_t(100000001),
                                  uint64_t(data_.size()), uint64_t(data_.size() - 7), uint64_t(0), uint64_t(1)}) {
        std::string data = data_;
        std::memcpy(data.data(), &length, 8);
        expect_refused(data, DSOPT_ERR_FORMAT, "");
        expect_refused(data.substr(0, 8), DSOPT_ERR_FORMAT, "");
    }
    MemoryFile memory_file{data_};
    dsopt_io io = memory_file.io();
    for (const uint64_t total :
         {uint64_t(0), uint64_t(7), uint64_t(1) << 63, UINT64_MAX}) { // the total size that the caller states
        io.total = total;
        EXPECT_NE(dsopt_optimizer_load(trainer_.opt(), nullptr, &io), DSOPT_OK);
        EXPECT_TRUE(same(state_bytes(), before_));
    }
}

TEST_F(Load, RefusesDuplicateKeys) {
    EXPECT_OK(load(trainer_.opt(), with_header(data_, "\"calls\"", "\"calls\"")));
    before_ = state_bytes();
    expect_refused(with_header(data_, R"("calls":"2")", R"("calls":"2","calls":"2")"), DSOPT_ERR_FORMAT, "calls|twice");
    expect_refused(with_header(data_, R"("calls":"2")", R"("calls":"2","format":"dsopt")"), DSOPT_ERR_FORMAT,
                   "format|twice");
    const std::string tensor = R"("p2.exp_avg":{)";
    expect_refused(with_header(data_, tensor, R"("p0.exp_avg":{)"), DSOPT_ERR_FORMAT, "p0.exp_avg");
    expect_refused(with_header(data_, R"("__metadata__":{)", R"("__metadata__":{"a":"b",)"), DSOPT_ERR_FORMAT, "");
}

TEST_F(Load, StopsAtFailedReadCallback) {
    for (int n = 0;; ++n) {
        MemoryFile memory_file{data_};
        memory_file.fail_at = n;
        const dsopt_io io = memory_file.io(DSOPT_IO_PARAMS);
        const dsopt_status status = dsopt_optimizer_load(trainer_.opt(), nullptr, &io);
        if (memory_file.calls <= n) {
            EXPECT_EQ(status, DSOPT_OK);
            EXPECT_GT(n, 10);
            break;
        }
        ASSERT_TRUE(refused(status, DSOPT_ERR_IO, "-42"));
        ASSERT_TRUE(same(state_bytes(), before_)) << n;
    }
}

// After a failed load before the first step, masters must still be initialized from the parameters.
TEST(LoadBeforeFirstStep, LeavesOptimizerNewOnFailure) {
    const std::vector<Shape> shapes = shapes_of({3000, 5}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Trainer source(shapes, make_group(DSOPT_ALGORITHM_ADAMW)), plain(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
    source.train(1, 3);
    const std::string good = saved(source.opt());
    plain.train(1, 2);
    std::vector<std::string> bad(4, good);
    bad[0].back() = char(bad[0].back() ^ 1); // a checksum
    bad[1].pop_back();                       // a length
    Content missing(good);
    missing.drop_tensor("p1.exp_avg");
    bad[2] = missing.text();
    Content version(good);
    version.field("format_version") = "99";
    bad[3] = version.text();
    for (const std::string &data : bad) {
        const Trainer trainer(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
        EXPECT_NE(load(trainer.opt(), data), DSOPT_OK);
        trainer.train(1, 2);
        EXPECT_TRUE(same(trainer.text(), plain.text()));
    }
}

TEST(LoadBeforeFirstStep, LeavesBoundMastersUnchangedOnFailure) {
    const std::vector<Shape> shapes = shapes_of({30}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Trainer source(shapes, make_group(DSOPT_ALGORITHM_ADAMW)), trainer(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
    source.train(1);
    std::string data = saved(source.opt());
    data.back() = char(data.back() ^ 1);
    const Array master(DSOPT_DTYPE_F32, 30, 0);
    master.fill(5);
    const std::string before = master.text();
    const dsopt_tensor list[] = {master.tensor(),
                                 {nullptr, 30, DSOPT_DTYPE_F32, 0},
                                 {nullptr, 30, DSOPT_DTYPE_F32, 0},
                                 {nullptr, 1, DSOPT_DTYPE_I32, 0}};
    ASSERT_OK(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, list, 4));
    EXPECT_EQ(load(trainer.opt(), data), DSOPT_ERR_CHECKSUM);
    EXPECT_TRUE(same(master.text(), before));
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg"), std::vector<float>(30, 0));
}

} // namespace checkpoint_refusals_tests
