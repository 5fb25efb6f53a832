// SPDX-License-Identifier: Apache-2.0
// main() of the unit tests: one program contains many subjects, and Meson runs one subject at a time.
//
//     test_unit [--gtest_...] [FOLDER...]: the tests whose source is in one of these folders, or all
#include <cstdio>
#include <gtest/gtest.h>
#include <string>

int main(int argc, char **argv) {
    testing::InitGoogleTest(&argc, argv);
    if (argc == 1) return RUN_ALL_TESTS();
    std::string filter;
    const testing::UnitTest &all = *testing::UnitTest::GetInstance();
    for (int i = 0; i < all.total_test_suite_count(); ++i)
        for (int k = 0; k < all.GetTestSuite(i)->total_test_count(); ++k) {
            const testing::TestInfo &one = *all.GetTestSuite(i)->GetTestInfo(k);
            for (int folder = 1; folder < argc; ++folder)
                if (std::string(one.file()).find("/" + std::string(argv[folder]) + "/") != std::string::npos)
                    filter += std::string(one.test_suite_name()) + "." + one.name() + ":";
        }
    if (filter.empty()) {
        std::fprintf(stderr, "no test is in %s\n", argv[1]);
        return 1;
    }
    // The caller's filter is kept. Tests of a folder can be excluded too: --gtest_filter=-A.B:C.D
    const std::string wanted = testing::GTEST_FLAG(filter);
    testing::GTEST_FLAG(filter) = wanted == "*" ? filter : wanted[0] == '-' ? filter + wanted : wanted;
    return RUN_ALL_TESTS();
}
