// SPDX-License-Identifier: Apache-2.0
// Labels of tests. LABEL(name); labels the next test, LABEL_PARAMS(name, "pattern"); only those of its parameters whose
// names match, and LABEL_FILE(name); every test of the file. main.cc leaves labelled tests out of some runs.
#pragma once
#include <vector>

namespace test {

enum class Label {
    /// Tests the CPU backend, or uses memory that only the CPU can access. Left out on CUDA.
    cpu,
    /// Takes long on the emulated device and runs no kernel that shorter tests do not run. Left out there.
    long_emulated,
    /// Reads state that depends on time: not compared with the CPU.
    varies,
    /// Starts no second thread. Left out under TSan.
    one_thread,
    /// One of many cases in which threads interact in the same way. Left out under TSan.
    one_of_many,
    /// A long training run, or statistics. Left out under sanitizers, because shorter tests run the same code.
    numbers_only,
    /// Takes a second or more of the processor, and shorter tests find most of what it finds. In suites of its own
    /// (slow-*), which ./dev test does not run.
    slow
};

struct Labelled {
    const char *file, *name, *params;
    int line;         // of the label; 0: the label applies to the whole file
    const char *test; // "Suite.Name"; set where a macro defines several tests in one line
};
inline std::vector<Labelled> &labels() {
    static std::vector<Labelled> all;
    return all;
}
struct AddLabel {
    AddLabel(Label, const char *name, const char *params, const char *file, int line, const char *test = nullptr) {
        labels().push_back({file, name, params, line, test});
    }
};
#define DSOPT_LABEL_JOINED(a, b) a##b
#define DSOPT_LABEL_NAME(number) DSOPT_LABEL_JOINED(kLabel, number)
#define LABEL(name) LABEL_PARAMS(name, "*")
#define LABEL_PARAMS(name, params)                                                                                     \
    static const test::AddLabel DSOPT_LABEL_NAME(__COUNTER__)(test::Label::name, #name, params, __FILE__, __LINE__)
#define LABEL_TEST(name, suite, which)                                                                                 \
    static const test::AddLabel DSOPT_LABEL_NAME(__COUNTER__)(test::Label::name, #name, "*", __FILE__, 0,              \
                                                              #suite "." #which)
#define LABEL_FILE(name)                                                                                               \
    static const test::AddLabel DSOPT_LABEL_NAME(__COUNTER__)(test::Label::name, #name, "*", __FILE__, 0)

} // namespace test
