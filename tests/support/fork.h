// SPDX-License-Identifier: Apache-2.0
// Checks in a child of fork().
#pragma once
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace test {

/// Runs body(expect) in a child, where assertions do not work: its exit code is the number of the first expect(false).
/// A child that hangs is killed. `make_child` may be _Fork().
template <class Body> testing::AssertionResult passes_in_child(const Body &body, pid_t (*make_child)() = ::fork) {
    constexpr int thrown = 255;
    const pid_t child = make_child();
    if (child < 0) return testing::AssertionFailure() << "fork: " << std::strerror(errno);
    if (child == 0) {
        ::alarm(120);
        int failed = 0, count = 0;
        const auto expect = [&](bool good) {
            ++count;
            if (!good && failed == 0) failed = count;
        };
        try {
            body(expect);
        } catch (const std::exception &) { failed = failed != 0 ? failed : thrown; }
        ::_exit(failed);
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child)
        return testing::AssertionFailure() << "waitpid: " << std::strerror(errno);
    if (WIFSIGNALED(status))
        return testing::AssertionFailure()
               << "the child " << (WTERMSIG(status) == SIGALRM ? "hung" : ::strsignal(WTERMSIG(status)));
    if (WEXITSTATUS(status) == thrown) return testing::AssertionFailure() << "the child threw";
    if (WEXITSTATUS(status) != 0)
        return testing::AssertionFailure() << "check " << WEXITSTATUS(status) << " failed in the child";
    return testing::AssertionSuccess();
}

} // namespace test
