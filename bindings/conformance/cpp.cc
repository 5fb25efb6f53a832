// SPDX-License-Identifier: Apache-2.0
// The conformance program in C++; the README.md in this folder defines what it computes.
#include <cstdio>
#include <cstring>
#include <dsopt.hpp>
#include <future>

namespace {

class Generator {
public:
    explicit Generator(std::uint32_t seed) : x_(seed) {}
    void fill(std::vector<float> &values) {
        for (float &value : values) {
            x_ = x_ * 1664525u + 1013904223u;
            value = static_cast<float>(x_ >> 8) * 0x1p-24f - 0.5f;
        }
    }

private:
    std::uint32_t x_;
};

class Digest {
public:
    /// Adds memory as it is: the library needs a little-endian machine.
    template <class T> void add(const std::vector<T> &values) {
        const auto *const bytes = reinterpret_cast<const unsigned char *>(values.data());
        for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3u;
    }
    std::uint64_t value() const { return hash_; }

private:
    std::uint64_t hash_ = 0xcbf29ce484222325u;
};

struct Model {
    std::vector<dsopt::param> params;
    std::vector<std::vector<float>> weights, gradients;
    std::vector<dsopt::tensor> grads;
    Generator next_gradients;
    Model(std::initializer_list<std::pair<const char *, std::size_t>> shapes, std::uint32_t seed,
          std::uint32_t grad_seed) :
        weights(shapes.size()),
        gradients(shapes.size()),
        next_gradients(grad_seed) {
        Generator initial(seed);
        for (const auto &[name, numel] : shapes) {
            const std::size_t i = params.size();
            weights[i].resize(numel);
            gradients[i].resize(numel);
            initial.fill(weights[i]);
            params.push_back({dsopt::view(weights[i]), name});
            grads.push_back(dsopt::view(gradients[i]));
        }
    }
    void train(dsopt::optimizer &opt, int steps) {
        for (int s = 0; s < steps; ++s) {
            for (std::vector<float> &gradient : gradients) next_gradients.fill(gradient);
            opt.step(grads);
        }
    }
};

template <class T> void add_state(Digest &digest, dsopt::optimizer &opt, const char *name) {
    for (std::int64_t i = 0; i < opt.state_count(); ++i) {
        const dsopt::state_entry entry = opt.state(i);
        if (std::strcmp(entry.name(), name) != 0) continue;
        if (entry.dtype() != static_cast<std::int32_t>(dsopt::dtype_of<T>::value)) continue;
        std::vector<T> values(static_cast<std::size_t>(entry.numel()));
        opt.export_state(i, values);
        digest.add(values);
    }
}

void adamw(Digest &digest) {
    Model model({{"a", 1}, {"b", 7}, {"c", 4099}}, 12345, 1000);
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.max_norm = 1;
    dsopt::optimizer opt(ctx, options);
    dsopt::adamw group;
    group.lr = 0.015625;
    group.weight_decay = 0.125;
    opt.add_group(group, model.params);
    model.train(opt, 10);
    for (const std::vector<float> &weights : model.weights) digest.add(weights);
    for (const char *const name : {"exp_avg", "exp_avg_sq"}) add_state<float>(digest, opt, name);
}

void onebit(Digest &digest) {
    Model models[] = {{{{"u", 5}, {"v", 130}}, 54321, 2000}, {{{"u", 5}, {"v", 130}}, 54321, 2001}};
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    const auto run = [&](int rank) {
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        dsopt::optimizer_options options;
        options.data = &comm;
        options.averages = true;
        dsopt::optimizer opt(ctx, options);
        dsopt::onebit_adam group;
        group.lr = 0.015625;
        group.freeze_step = 3;
        opt.add_group(group, models[rank].params);
        models[rank].train(opt, 6);
    };
    std::future<void> other = std::async(std::launch::async, run, 1);
    run(0);
    other.get();
    if (models[0].weights != models[1].weights) throw std::runtime_error("the ranks have different weights");
    for (const std::vector<float> &weights : models[0].weights) digest.add(weights);
}

dsopt::bf16 to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return dsopt::bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

void low_precision(Digest &digest) {
    Model model({{"a", 1}, {"b", 7}, {"c", 4099}}, 12345, 1000);
    std::vector<std::vector<dsopt::bf16>> weights(3);
    for (std::size_t i = 0; i < 3; ++i) {
        for (const float value : model.weights[i]) weights[i].push_back(to_bf16(value));
        model.params[i].tensor = dsopt::view(weights[i]);
    }
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.masters = dsopt::masters::remainder;
    options.seed = 7;
    dsopt::optimizer opt(ctx, options);
    dsopt::adamw group;
    group.lr = 0.015625;
    group.weight_decay = 0.125;
    group.exp_avg_format = dsopt::moment::e4m3;
    group.exp_avg_sq_format = dsopt::moment::bf16_random;
    opt.add_group(group, {model.params[0], model.params[1]});
    group.exp_avg_format = group.exp_avg_sq_format = dsopt::moment::q8;
    opt.add_group(group, {model.params[2]});
    model.train(opt, 10);
    for (const std::vector<dsopt::bf16> &values : weights) digest.add(values);
    add_state<std::int16_t>(digest, opt, "remainder");
    add_state<dsopt::f8_e4m3>(digest, opt, "exp_avg"); // a and b
    add_state<std::uint8_t>(digest, opt, "exp_avg");   // c
    add_state<float>(digest, opt, "exp_avg_scale");
    add_state<dsopt::bf16>(digest, opt, "exp_avg_sq");
    add_state<std::uint8_t>(digest, opt, "exp_avg_sq");
    add_state<float>(digest, opt, "exp_avg_sq_scale");
}

} // namespace

int main() {
    try {
        Digest digest;
        adamw(digest);
        onebit(digest);
        low_precision(digest);
        std::printf("cpp %016llx\n", static_cast<unsigned long long>(digest.value()));
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
