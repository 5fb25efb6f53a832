// SPDX-License-Identifier: Apache-2.0
// bf16 weights with fp32 masters, trained twice in C++: once without interruption, once interrupted and resumed from a
// checkpoint in memory. Both end with the same bits.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dsopt.hpp>

namespace {

constexpr int kInputs = 16, kSteps = 1000;

/// A checkpoint in memory; a class with these members can also write to a socket or an object store.
class Memory {
public:
    void write(const void *data, std::size_t bytes) {
        const char *const from = static_cast<const char *>(data);
        bytes_.insert(bytes_.end(), from, from + bytes);
    }
    std::uint64_t size() const { return bytes_.size(); }
    void read(std::uint64_t offset, void *data, std::size_t bytes) const {
        if (bytes != 0) std::memcpy(data, bytes_.data() + offset, bytes);
    }

private:
    std::vector<char> bytes_;
};

/// Fits y = sum of x_i cos(i), in bf16.
class Regression {
public:
    explicit Regression(const dsopt::context &ctx) : ctx_(ctx), opt_(ctx, clipped()) {
        opt_.add_group(dsopt::adamw{}, {{dsopt::view(weights_), "weights", {kInputs / 8, 8}}});
    }
    void train(int from, int to) {
        std::vector<float> weights32(kInputs), gradient(kInputs), x(kInputs);
        for (int step = from; step < to; ++step) {
            ctx_.axpby(nullptr, {dsopt::view(weights_)}, 0, {dsopt::view(weights32)}); // bf16 to fp32
            float error = 0;
            for (std::size_t i = 0; i < kInputs; ++i) {
                x[i] = std::sin(static_cast<float>((step + 1) * static_cast<int>(i + 1)));
                error += (weights32[i] - std::cos(static_cast<float>(i))) * x[i];
            }
            for (std::size_t i = 0; i < kInputs; ++i) gradient[i] = error * x[i];
            opt_.set(dsopt::key::lr, 0.05 * (kSteps - step) / kSteps);
            opt_.step({dsopt::view(gradient)}); // fp32 gradients of bf16 weights
        }
    }
    void save(Memory &memory) {
        dsopt::save_options options;
        options.params = true;
        opt_.save_to(memory, options);
    }
    void load(Memory &memory) {
        dsopt::load_options options;
        options.params = true;
        opt_.load_from(memory, options);
    }
    /// Returns the largest distance of a weight from the solution.
    float distance() const {
        std::vector<float> weights32(kInputs);
        ctx_.axpby(nullptr, {dsopt::read_only(weights_)}, 0, {dsopt::view(weights32)});
        float largest = 0;
        for (std::size_t i = 0; i < kInputs; ++i) {
            largest = std::max(largest, std::abs(weights32[i] - std::cos(static_cast<float>(i))));
        }
        return largest;
    }
    const std::vector<dsopt::bf16> &weights() const { return weights_; }

private:
    static dsopt::optimizer_options clipped() {
        dsopt::optimizer_options options;
        options.max_norm = 1;
        return options;
    }
    const dsopt::context &ctx_;
    dsopt::optimizer opt_;
    std::vector<dsopt::bf16> weights_ = std::vector<dsopt::bf16>(kInputs);
};

} // namespace

int main() {
    try {
        dsopt::context ctx;
        Regression whole(ctx), first(ctx), second(ctx);
        whole.train(0, kSteps);
        Memory checkpoint;
        first.train(0, kSteps / 2);
        first.save(checkpoint);
        second.load(checkpoint);
        second.train(kSteps / 2, kSteps);
        std::printf("learnt: %s, the same bits: %s\n", whole.distance() < 0.05f ? "yes" : "no",
                    whole.weights() == second.weights() ? "yes" : "no");
    } catch (const dsopt::error &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
