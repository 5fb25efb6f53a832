// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/function_ref.h"
#include "base/not_copied.h"
#include "dsopt.h"

namespace dsopt {

/// Where the parts of a CPU step run: the library's threads, or the pool that the caller brought. Copied freely.
struct Parallel {
    static constexpr int kMaxThreads = 4096;
    int threads = 1;                   // and the most parts that work is cut into
    dsopt_parallel_for hook = nullptr; // NULL: the library's threads
    void *user = nullptr;

    /// Runs body(i) for i in [0, parts) and returns when all are done. `body` must not throw. DSOPT_ERR_HOOK: the pool
    /// did not run each part once.
    template <class Body> void run(int64_t parts, const Body &body) const {
        if (parts == 1)
            body(int64_t(0));
        else if (parts > 1)
            run_parts(parts, body);
    }

private:
    void run_parts(int64_t parts, FunctionRef<void(int64_t)> body) const;
};

/// As many as the environment variable OMP_NUM_THREADS says, else as many processors as this thread may run on, but at
/// most OMP_THREAD_LIMIT. Programs and job schedulers set these for all libraries of a process, OpenMP or not.
int default_threads();

/// Default floating-point environment for the life of the object: callers that flush denormals or round differently
/// would otherwise change the results. One per thread that computes.
class DefaultFloatEnvironment : NotCopied {
public:
    DefaultFloatEnvironment();
    ~DefaultFloatEnvironment();

private:
    unsigned long saved_;
};

} // namespace dsopt
