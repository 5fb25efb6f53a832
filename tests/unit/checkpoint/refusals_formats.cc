// SPDX-License-Identifier: Apache-2.0
// A load refuses moments of another format, without their scales or of a wrong size, and changes nothing.
#include "content.h"
#include <array>
#include <functional>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_refusals_formats_tests {

/// Returns an optimizer with a moment in a format, and two parameters.
Trainer make_lion(int32_t format) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_LION);
    group.exp_avg_format = format;
    return Trainer(shapes_of({300, 600}), group);
}

TEST(LoadFormats, RefusesCodesWithoutScalesOrOfAWrongSize) {
    const Trainer source = make_lion(DSOPT_MOMENT_E4M3);
    source.train(1);
    const std::string file = saved(source.opt());
    for (const int32_t format : {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_F32, DSOPT_MOMENT_Q8}) {
        const Trainer target = make_lion(format);
        target.train(2);
        const std::string before = target.text();
        const auto expect_refused = [&](const std::function<void(Content &)> &change, const char *words) {
            Content content(file);
            change(content);
            EXPECT_TRUE(refused(load(target.opt(), content.text(), DSOPT_IO_CONVERT), DSOPT_ERR_MISMATCH, words));
            EXPECT_TRUE(same(target.text(), before));
        };
        expect_refused([](Content &c) { c.drop_tensor("p1.exp_avg_scale"); }, "p1.exp_avg_scale");
        expect_refused([](Content &c) { c.drop_tensor("p1.exp_avg"); }, "p1.exp_avg");
        const auto shorten = [](const char *name, size_t size) {
            return [=](Content &c) {
                dsopt::TensorEntry &entry = c.tensor(name);
                entry.shape = {entry.shape[0] - 1};
                entry.bytes -= size;
            };
        };
        expect_refused(shorten("p1.exp_avg_scale", 4), "p1.exp_avg_scale|bytes");
        expect_refused(shorten("p0.exp_avg", 1), "p0.exp_avg|bytes");
        expect_refused([](Content &c) { c.tensor("p1.exp_avg_scale").dtype = DSOPT_DTYPE_I32; },
                       "p1.exp_avg_scale|I32|F32");
        expect_refused(
            [](Content &c) {
                c.tensor("p0.exp_avg").dtype = DSOPT_DTYPE_I16;
                c.tensor("p0.exp_avg").shape = {150};
            },
            "p0.exp_avg|I16");
    }
}

TEST(LoadFormats, RefusesFilesOfRanksWithDifferentCodesOrScales) {
    const Trainer source = make_lion(DSOPT_MOMENT_E4M3);
    source.train(1);
    for (const int32_t format : {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_F32, DSOPT_MOMENT_Q8}) {
        const Trainer target = make_lion(format);
        target.train(2);
        const std::string before = target.text();
        for (const std::string name : {"p1.exp_avg", "p1.exp_avg_scale"}) {
            std::array<Content, 2> both = {Content(saved(source.opt())), Content(saved(source.opt()))};
            for (size_t rank = 0; rank < 2; ++rank) {
                both[rank].field("rank") = std::to_string(rank);
                both[rank].field("ranks") = "2";
            }
            for (size_t i = 0; i < both[1].tensors.size(); ++i)
                if (both[1].tensors[i].name == name) both[1].bytes[i][0] ^= 1;
            const MemoryFile first{both[0].text()}, second{both[1].text()};
            EXPECT_TRUE(refused(load_all(target.opt(), {&first, &second}, DSOPT_IO_CONVERT), DSOPT_ERR_MISMATCH,
                                "not the same|" + name));
            EXPECT_TRUE(same(target.text(), before));
        }
    }
}

TEST(LoadFormats, RefusesAnotherFormatWithoutTheFlag) {
    const Trainer source = make_lion(DSOPT_MOMENT_Q8), target = make_lion(DSOPT_MOMENT_E4M3);
    source.train(1);
    target.train(2);
    const std::string before = target.text();
    EXPECT_TRUE(refused(load(target.opt(), saved(source.opt())), DSOPT_ERR_MISMATCH, "p0.exp_avg|U8|F8_E4M3"));
    EXPECT_TRUE(same(target.text(), before));
}

} // namespace checkpoint_refusals_formats_tests
