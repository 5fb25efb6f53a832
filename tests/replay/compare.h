// SPDX-License-Identifier: Apache-2.0
// Compares the engine's results with the record, and checks at the end that no recorded tensor was left out.
#pragma once
#include "golden_file.h"
#include <map>
#include <set>
#include <string>
#include <vector>

namespace replay {

/// Tolerance for the difference from the recorded value. Infinities must be equal; any two NaNs are.
struct Rule {
    enum Kind {
        by_dtype, ///< F64, F32: 2e-6 of the tensor's peak; F16, BF16: one unit in the last place; integers: exact
        relative, ///< differences are at most `allowed` times the recorded value
        exact,    ///< values must be equal: loss scales, and other integers or powers of two
        within ///< differences are at most `allowed`: the tolerance of residuals is relative to the largest scale, not
               ///< to their peak
    };
    Kind kind = by_dtype;
    double allowed = 0;
};

class Comparison {
public:
    explicit Comparison(const GoldenFile &file) : file_(file) {}
    const GoldenFile &file() const { return file_; }

    /// Returns a tensor that the engine receives. Failure if it is missing or has another dtype or shape.
    const Tensor &input(const std::string &name, int32_t dtype, const std::vector<int64_t> &shape);
    /// Returns a tensor that will be compared, of any dtype. Failure if it is missing or has another shape.
    const Tensor &output(const std::string &name, const std::vector<int64_t> &shape) const;

    /// Compares one row of the leading dimension, or a tensor without such a dimension (`*_init`).
    void row(const Tensor &want, int64_t t, const std::vector<double> &got, const Rule &rule = {});
    void whole(const Tensor &want, const std::vector<double> &got, const Rule &rule = {});

    /// Compares one value of a tensor with a leading dimension; `index` counts all of its elements.
    void one(const Tensor &want, int64_t index, double got, const Rule &rule);
    /// Compares the norm of the difference from a row, or from the whole tensor if `t` is -1, with `allowed`. Returns
    /// the fraction of it that is used.
    double within_norm(const Tensor &want, int64_t t, const std::vector<double> &got, double allowed);
    /// Adds words to the summary of a case that passes.
    void note(const std::string &text) { notes_ += text; }

    /// Returns the largest finite magnitude in all rows of the tensor, 0 if there is none.
    double peak(const Tensor &tensor);

    /// Failure that names a tensor, if it is neither an input nor compared up to its last value.
    void finish() const;

    bool passed() const { return wrong_ == 0; }
    /// Returns "worst-relative-difference tensor values-compared", or the position and size of the worst difference.
    std::string summary() const;

private:
    /// Marks values as compared, from index `first` on.
    void see(const Tensor &want, int64_t first, size_t count);
    void values(const Tensor &want, int64_t t, int64_t first, const std::vector<double> &got, const Rule &rule);

    struct Worst {
        double fraction = 0; ///< fraction of the tolerance; above 1 is a failure
        double relative = 0; ///< relative to the peak
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
    std::string notes_;
};

/// Tolerance for residuals: 4e-6 of the largest scale from which they were computed. If the residuals are far below
/// that, at most 2e-5 of their own peak, but at least the rounding error at that scale.
Rule error_rule(Comparison &comparison, const Tensor &error, const Tensor &scale);

} // namespace replay
