// SPDX-License-Identifier: Apache-2.0
#include "compare.h"
#include <algorithm>
#include <cmath>
#include <cstdio>

namespace replay {
namespace {

constexpr double float_tolerance = 2e-6; // of the tensor's peak

std::string shape_text(const std::vector<int64_t> &shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
    return text + "]";
}

/// Index of a finite value in the sorted list of all values of a 16-bit format: adjacent values differ by 1, both zeros
/// are 0.
int64_t ordinal(double value, int32_t dtype) {
    const int fraction_bits = dtype == DSOPT_DTYPE_F16 ? 10 : 7;
    const int smallest =
        dtype == DSOPT_DTYPE_F16 ? -14 : -126; // exponent of the smallest normal number, shared by subnormals
    int exponent = 0;
    (void)std::frexp(value, &exponent); // |value| = f * 2^exponent, f in [0.5, 1)
    exponent = value == 0 ? smallest : std::max(exponent - 1, smallest);
    // For a normal number `units` includes the hidden bit, which adds the one binade at which normals begin.
    const int64_t units = std::llround(std::ldexp(std::abs(value), fraction_bits - exponent));
    const int64_t magnitude = units + (int64_t(exponent - smallest) << fraction_bits);
    return value < 0 ? -magnitude : magnitude;
}

/// Returns the difference as a fraction of the tolerance: 0 = equal, above 1 = failure.
double used_tolerance(double got, double want, int32_t dtype, const Rule &rule, double peak) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return 0;
    if (!std::isfinite(got) || !std::isfinite(want)) return HUGE_VAL;
    double allowed = 0;
    if (rule.kind == Rule::within) {
        allowed = rule.allowed;
    } else if (rule.kind == Rule::relative) {
        allowed = rule.allowed * std::abs(want);
    } else if (rule.kind == Rule::by_dtype) {
        if (dtype == DSOPT_DTYPE_F16 || dtype == DSOPT_DTYPE_BF16)
            return double(std::abs(ordinal(got, dtype) - ordinal(want, dtype)));
        if (dtype == DSOPT_DTYPE_F32 || dtype == DSOPT_DTYPE_F64) allowed = float_tolerance * peak;
    }
    return allowed > 0 ? std::abs(got - want) / allowed : HUGE_VAL;
}

} // namespace

const Tensor &Comparison::output(const std::string &name, const std::vector<int64_t> &shape) const {
    const Tensor *tensor = file_.find(name);
    if (tensor == nullptr) fail("tensor %s is missing", name.c_str());
    if (tensor->shape != shape)
        fail("tensor %s has shape %s, expected %s", name.c_str(), shape_text(tensor->shape).c_str(),
             shape_text(shape).c_str());
    return *tensor;
}

const Tensor &Comparison::input(const std::string &name, int32_t dtype, const std::vector<int64_t> &shape) {
    const Tensor &tensor = output(name, shape);
    if (tensor.dtype != dtype)
        fail("tensor %s is %s, expected %s", name.c_str(), dtype_name(tensor.dtype), dtype_name(dtype));
    inputs_.insert(name);
    return tensor;
}

double Comparison::peak(const Tensor &tensor) {
    const auto [entry, is_new] = peaks_.emplace(tensor.name, 0.0);
    if (is_new)
        for (int64_t i = 0; i < tensor.numel; ++i) {
            const double magnitude = std::abs(tensor.value(i));
            if (std::isfinite(magnitude)) entry->second = std::max(entry->second, magnitude);
        }
    return entry->second;
}

void Comparison::row(const Tensor &want, int64_t t, const std::vector<double> &got, const Rule &rule) {
    if (want.shape.empty() || t < 0 || t >= want.shape[0])
        fail("tensor %s has no row %lld", want.name.c_str(), (long long)t);
    if (int64_t(got.size()) != want.row_numel())
        fail("tensor %s: the engine has %zu values in a row of %lld", want.name.c_str(), got.size(),
             (long long)want.row_numel());
    values(want, t, t * want.row_numel(), got, rule);
}

void Comparison::whole(const Tensor &want, const std::vector<double> &got, const Rule &rule) {
    if (int64_t(got.size()) != want.numel)
        fail("tensor %s: the engine has %zu values of %lld", want.name.c_str(), got.size(), (long long)want.numel);
    values(want, -1, 0, got, rule);
}

void Comparison::one(const Tensor &want, int64_t index, double got, const Rule &rule) {
    values(want, index / std::max<int64_t>(want.row_numel(), 1), index, {got}, rule);
}

void Comparison::see(const Tensor &want, int64_t first, size_t count) {
    std::vector<bool> &seen = compared_[want.name];
    seen.resize(size_t(want.numel));
    for (size_t i = 0; i < count; ++i) seen[size_t(first) + i] = true;
    count_ += int64_t(count);
}

double Comparison::within_norm(const Tensor &want, int64_t t, const std::vector<double> &got, double allowed) {
    const int64_t numel = t < 0 ? want.numel : want.row_numel(), first = t < 0 ? 0 : t * numel;
    if (int64_t(got.size()) != numel)
        fail("tensor %s: the engine has %zu values of %lld", want.name.c_str(), got.size(), (long long)numel);
    see(want, first, got.size());
    double squares = 0, size = 0, largest = -1;
    size_t element = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double wanted = want.value(first + int64_t(i)), difference = std::abs(got[i] - wanted);
        squares += difference * difference;
        size += wanted * wanted;
        if (difference > largest) largest = difference, element = i;
    }
    const double norm = std::sqrt(squares);
    const double fraction = norm == 0 ? 0 : norm <= allowed || norm > allowed ? norm / allowed : HUGE_VAL;
    if (fraction > 1) ++wrong_;
    if (fraction > worst_.fraction)
        worst_ = {fraction,
                  std::isnan(norm) || size == 0 ? HUGE_VAL : norm / std::sqrt(size),
                  &want,
                  t,
                  int64_t(element),
                  got[element],
                  want.value(first + int64_t(element))};
    return fraction;
}

void Comparison::values(const Tensor &want, int64_t t, int64_t first, const std::vector<double> &got,
                        const Rule &rule) {
    see(want, first, got.size());
    const double reference = peak(want);
    for (size_t i = 0; i < got.size(); ++i) {
        const double wanted = want.value(first + int64_t(i));
        const double fraction = used_tolerance(got[i], wanted, want.dtype, rule, reference);
        if (fraction > 1) ++wrong_;
        if (fraction <= worst_.fraction) continue;
        const double difference = std::abs(got[i] - wanted);
        worst_ = {fraction,   std::isnan(difference) || reference == 0 ? HUGE_VAL : difference / reference,
                  &want,      t,
                  int64_t(i), got[i],
                  wanted};
    }
}

void Comparison::finish() const {
    for (const auto &[name, tensor] : file_.tensors()) {
        if (inputs_.count(name) != 0) continue;
        const auto found = compared_.find(name);
        if (found == compared_.end()) fail("tensor %s was not compared", name.c_str());
        const auto &seen = found->second;
        const auto done = std::count(seen.begin(), seen.end(), true);
        if (done != tensor.numel)
            fail("tensor %s: only %lld of %lld values were compared", name.c_str(), (long long)done,
                 (long long)tensor.numel);
    }
    if (count_ == 0) fail("there was nothing to compare");
}

std::string Comparison::summary() const {
    char text[512];
    const char *name = worst_.tensor == nullptr ? "-" : worst_.tensor->name.c_str();
    if (passed()) {
        std::snprintf(text, sizeof text, "%.2g %s %lld", worst_.relative, name, (long long)count_);
        return text + notes_;
    }
    const std::string step = worst_.t < 0 ? "initial" : "step " + std::to_string(worst_.t);
    std::snprintf(text, sizeof text, "%.2g %s (%s, element %lld, got %.9g, want %.9g), %lld of %lld values differ",
                  worst_.relative, name, step.c_str(), (long long)worst_.element, worst_.got, worst_.want,
                  (long long)wrong_, (long long)count_);
    return text;
}

Rule error_rule(Comparison &comparison, const Tensor &error, const Tensor &scale) {
    const double largest = comparison.peak(scale);
    const double by_peak = std::max(2e-5 * comparison.peak(error), 1e-6 * largest);
    return {Rule::within, std::min(4e-6 * largest, by_peak)};
}

} // namespace replay
