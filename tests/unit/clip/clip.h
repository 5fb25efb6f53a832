// SPDX-License-Identifier: Apache-2.0
// Common parts of the tests of clipping, of Inf and NaN, and of reports.
#pragma once
#include "support/harness.h"

namespace test {

/// Returns an Adam group whose exp_avg is the gradient that the rule uses: beta1 is 0, and there is no weight decay.
inline dsopt_group gradient_as_moment(double max_norm = 0) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
    group.beta1 = 0;
    group.max_norm = max_norm;
    return group;
}
/// Returns the L2 norm of arrays [begin, end), summed in long double.
inline double exact_norm(const std::vector<Array> &arrays, size_t begin = 0, size_t end = SIZE_MAX) {
    long double sum = 0;
    for (size_t i = begin; i < std::min(end, arrays.size()); ++i)
        for (const float x : arrays[i].floats()) sum += static_cast<long double>(x) * x;
    return double(std::sqrt(sum));
}
/// Returns arrays of three dtypes with elements in [-limit, limit).
inline std::vector<Array> mixed_arrays(Random &random, double limit = 1) {
    return {Array(DSOPT_DTYPE_F16, random.floats(5000, -limit, limit)),
            Array(DSOPT_DTYPE_BF16, random.floats(9, -limit, limit)),
            Array(DSOPT_DTYPE_F32, random.floats(4096, -limit, limit))};
}
/// Runs a step and returns the report that it writes to memory.
inline std::vector<float> step_with_report(const Trainer &trainer, dsopt_step step) {
    const Shared<float> report(DSOPT_REPORT_FLOATS, -7);
    step.report = report.data();
    must(trainer.step(step));
    return report;
}

} // namespace test
