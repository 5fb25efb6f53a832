// SPDX-License-Identifier: Apache-2.0
// main() of the unit tests. A program has the tests of many folders; each Meson test runs one folder on one device
// (device.h).
//
//     test_unit [--gtest_...] [--without=LABEL]... [--only=LABEL] [--digests=FILE] [FOLDER...]
//
// Runs the tests whose sources are in these folders, or all tests, except those with one of these labels (label.h).
// --only: of these, only those with that label.
// --digests: writes the digest (digest.h) of each test.
#include "device.h"
#include "digest.h"
#include "label.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fnmatch.h>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

/// Lines of the tests in each file. A label applies to the first test after it.
using Lines = std::map<std::string, std::set<int>>;

std::set<std::string> labels_of(const testing::TestInfo &test, const Lines &lines) {
    std::set<std::string> found;
    const std::string name = test.name(), param = name.substr(name.find('/') + 1); // without a parameter: the name
    const std::string base = std::string(test.test_suite_name()) + "." + name.substr(0, name.find('/'));
    for (const test::Labelled &label : test::labels()) {
        if (test.file() != std::string(label.file) || fnmatch(label.params, param.c_str(), 0) != 0) continue;
        if (label.test != nullptr && base != label.test) continue;
        if (label.line == 0 || *lines.at(test.file()).upper_bound(label.line) == test.line()) found.insert(label.name);
    }
    return found;
}

template <class F> void for_each_test(const F &body) {
    const testing::UnitTest &all = *testing::UnitTest::GetInstance();
    for (int i = 0; i < all.total_test_suite_count(); ++i)
        for (int k = 0; k < all.GetTestSuite(i)->total_test_count(); ++k) body(*all.GetTestSuite(i)->GetTestInfo(k));
}

using Digests = std::map<std::string, uint64_t>;

/// Computes the digest of each test, and fails tests that leave an error in the CUDA runtime.
class Watch : public testing::EmptyTestEventListener {
public:
    /// `wanted`: digests of the CPU, which must be equal. NULL: digests are not compared.
    explicit Watch(const Digests *wanted) : wanted_(wanted) {}
    Digests digests;

private:
    void OnTestEnd(const testing::TestInfo &info) override {
        test::end_copies();
        const std::string error = test::last_error(), name = std::string(info.test_suite_name()) + "." + info.name();
        if (!error.empty()) ADD_FAILURE() << "the test leaves an error in the CUDA runtime: " << error;
        digests[name] = test::take_digest();
        if (wanted_ != nullptr && wanted_->count(name) != 0 && digests[name] != wanted_->at(name))
            ADD_FAILURE() << "parameters or state that the test reads differ from those on the CPU";
    }
    const Digests *wanted_;
};

/// Runs the same tests on the CPU, in a child process. Returns their digests.
Digests digests_of_cpu(const std::vector<std::string> &arguments) {
    char path[] = "/tmp/dsopt-digests-XXXXXX";
    const int file = mkstemp(path);
    if (file < 0) throw std::runtime_error("mkstemp");
    close(file);
    const pid_t child = fork();
    if (child == 0) {
        setenv("DSOPT_TEST_DEVICE", "cpu", 1);
        std::vector<std::string> words = arguments;
        for (const char *label : {"cpu", "long_emulated", "varies"}) words.push_back(std::string("--without=") + label);
        words.push_back(std::string("--digests=") + path);
        std::vector<char *> list;
        for (std::string &word : words)
            if (word.rfind("--gtest_output", 0) != 0) list.push_back(word.data());
        list.push_back(nullptr);
        (void)!freopen("/dev/null", "w", stdout);
        execv("/proc/self/exe", list.data());
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) throw std::runtime_error("the run on the CPU failed");
    Digests digests;
    std::ifstream in(path);
    for (std::string name, digest; in >> name >> digest;) digests[name] = std::stoull(digest);
    std::remove(path);
    return digests;
}

} // namespace

int main(int argc, char **argv) {
    const std::vector<std::string> arguments(argv, argv + argc);
    testing::InitGoogleTest(&argc, argv);
    const std::string missing = test::device_error();
    if (!missing.empty()) {
        std::printf("skipped: %s\n", missing.c_str());
        return 77;
    }
    std::set<std::string> without;
    std::vector<std::string> folders;
    std::string digests, only;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i], value = word.substr(word.find('=') + 1);
        if (word.rfind("--without=", 0) == 0)
            without.insert(value);
        else if (word.rfind("--only=", 0) == 0)
            only = value;
        else if (word.rfind("--digests=", 0) == 0)
            digests = value;
        else
            folders.push_back("/" + word + "/");
    }
    if (test::on_cuda()) without.insert("cpu");
    if (test::is_emulated()) without.insert("long_emulated");

    Lines lines;
    for_each_test([&](const testing::TestInfo &info) { lines[info.file()].insert(info.line()); });
    std::string filter;
    std::map<std::string, int> left_out;
    bool any = false;
    for_each_test([&](const testing::TestInfo &info) {
        const std::string file = info.file();
        const auto holds = [&](const std::string &folder) { return file.find(folder) != std::string::npos; };
        if (!folders.empty() && std::none_of(folders.begin(), folders.end(), holds)) return;
        const std::set<std::string> labels = labels_of(info, lines);
        if (!only.empty() && labels.count(only) == 0) return;
        any = true;
        for (const std::string &label : labels)
            if (without.count(label) != 0) {
                ++left_out[label];
                return;
            }
        filter += std::string(info.test_suite_name()) + "." + info.name() + ":";
    });
    if (!any) {
        std::fprintf(stderr, "no test is in %s\n", folders[0].c_str());
        return 1;
    }
    for (const auto &[label, count] : left_out) std::printf("%d tests left out: %s\n", count, label.c_str());
    // A filter that selects tests replaces the folder and the labels. A filter that begins with '-' excludes tests of
    // the folder: --gtest_filter=-A.B:C.D
    const std::string wanted = testing::GTEST_FLAG(filter);
    if (filter.empty())
        testing::GTEST_FLAG(filter) = "-*";
    else
        testing::GTEST_FLAG(filter) = wanted == "*" ? filter : wanted[0] == '-' ? filter + wanted : wanted;
    Digests cpu;
    if (test::on_cuda()) cpu = digests_of_cpu(arguments);
    auto *const watch = new Watch(test::on_cuda() ? &cpu : nullptr);
    testing::UnitTest::GetInstance()->listeners().Append(watch);
    if (test::on_cuda() || !digests.empty()) test::start_digests();
    const int status = RUN_ALL_TESTS();
    if (!digests.empty()) {
        std::ofstream out(digests);
        for (const auto &[name, digest] : watch->digests) out << name << ' ' << digest << '\n';
    }
    return status;
}
