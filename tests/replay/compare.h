// SPDX-License-Identifier: Apache-2.0
// Compares what the engine made with what was recorded, and knows at the end whether anything recorded was left out.
#pragma once
#include "golden_file.h"
#include <map>
#include <set>
#include <string>
#include <vector>

namespace replay {

/// How far a value may be from the recorded one. Infinities and NaNs must always be the same; any two NaNs are.
struct Rule {
    enum Kind {
        by_dtype, ///< F64, F32: 2e-6 of the tensor's peak; F16, BF16: one unit in the last place; integers: exact
        exact,    ///< loss scales and other values that are integers or powers of two in disguise
        within    ///< `allowed` in absolute terms: error buffers are measured against the largest scale, not their own
                  ///< peak
    };
    Kind kind = by_dtype;
    double allowed = 0;
};

class Comparison {
public:
    explicit Comparison(const GoldenFile &file) : file_(file) {}

    /// A tensor that is given to the engine. Failure if it is missing or not of this dtype and shape.
    const Tensor &input(const std::string &name, int32_t dtype, const std::vector<int64_t> &shape);
    /// A tensor that will be compared, of any dtype. Failure if it is missing or of another shape.
    const Tensor &output(const std::string &name, const std::vector<int64_t> &shape) const;

    /// Compare one row of the leading dimension, or a tensor without such a dimension (`*_init`).
    void row(const Tensor &want, int64_t t, const std::vector<double> &got, const Rule &rule = {});
    void whole(const Tensor &want, const std::vector<double> &got, const Rule &rule = {});

    /// Largest finite magnitude in the whole record of the tensor, 0 if there is none.
    double peak(const Tensor &tensor);

    /// Failure that names a tensor which is neither an input nor compared to its last value.
    void finish() const;

    bool passed() const { return wrong_ == 0; }
    /// "worst-relative-difference tensor values-compared", or where and how far the worst value is off.
    std::string summary() const;

private:
    void values(const Tensor &want, int64_t t, int64_t first, const std::vector<double> &got, const Rule &rule);

    struct Worst {
        double share = 0;    ///< of what is allowed; above 1 is a failure
        double relative = 0; ///< to the peak
        const Tensor *tensor = nullptr;
        int64_t t = 0, element = 0;
        double got = 0, want = 0;
    };

    const GoldenFile &file_;
    std::set<std::string> inputs_;
    std::map<std::string, std::vector<bool>> compared_;
    std::map<std::string, double> peaks_;
    Worst worst_;
    int64_t count_ = 0, wrong_ = 0;
};

/// For what compression still owes: 4e-6 of the largest scale that made it. Where the errors stay far below that, no
/// more than 2e-5 of their own peak, down to what rounding at that scale leaves.
Rule error_rule(Comparison &comparison, const Tensor &error, const Tensor &scale);

} // namespace replay
