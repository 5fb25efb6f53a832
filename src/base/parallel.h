// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/function_ref.h"
#include "base/not_copied.h"
#include "dsopt.h"

namespace dsopt {

/// Runs the parts of a CPU step on the library's threads or on the caller's thread pool. May be copied.
struct Parallel {
    static constexpr int kMaxThreads = 4096;
    int threads = 1;                   // also the largest number of parts that work is partitioned into
    dsopt_parallel_for hook = nullptr; // NULL: the library's threads
    void *user = nullptr;

    /// Runs body(i) for i in [0, parts) and returns when all are done. `body` must not throw. Throws HOOK if the
    /// caller's pool did not run each part exactly once.
    template <class Body> void run(int64_t parts, const Body &body) const {
        if (parts == 1)
            body(int64_t(0));
        else if (parts > 1)
            run_parts(parts, body);
    }

private:
    void run_parts(int64_t parts, FunctionRef<void(int64_t)> body) const;
};

/// Returns the value of the environment variable OMP_NUM_THREADS, else the number of processors on which this thread
/// may run; in both cases at most OMP_THREAD_LIMIT. Programs and job schedulers set these variables for all libraries
/// of a process, OpenMP or not.
int default_threads();

/// Sets the default floating-point environment for the life of the object: callers that flush denormals or round
/// differently would otherwise change the results. Each thread that computes needs one.
class DefaultFloatEnvironment : NotCopied {
public:
    DefaultFloatEnvironment();
    ~DefaultFloatEnvironment();

private:
    unsigned long saved_;
};

} // namespace dsopt
