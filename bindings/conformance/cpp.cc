// SPDX-License-Identifier: Apache-2.0
// The conformance program in C++; the README.md in this folder defines what it computes.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dsopt.hpp>
#include <future>
#include <limits>

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
    void fill_gradients() {
        for (std::vector<float> &gradient : gradients) next_gradients.fill(gradient);
    }
    void train(dsopt::optimizer &opt, int steps) {
        for (int s = 0; s < steps; ++s) {
            fill_gradients();
            opt.step(grads);
        }
    }
};

/// Adds the state tensors of this name that have this dtype.
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
template <class T> void add_all(Digest &digest, const std::vector<std::vector<T>> &tensors) {
    for (const std::vector<T> &values : tensors) digest.add(values);
}

dsopt::adamw adamw_group() {
    dsopt::adamw group;
    group.lr = 0.015625;
    group.weight_decay = 0.125;
    return group;
}

void adamw(Digest &digest) {
    Model model({{"a", 1}, {"b", 7}, {"c", 4099}}, 12345, 1000);
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.max_norm = 1;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(adamw_group(), model.params);
    model.train(opt, 10);
    add_all(digest, model.weights);
    for (const char *const name : {"exp_avg", "exp_avg_sq"}) add_state<float>(digest, opt, name);
}

/// Calls `run(rank, context, comm)` on two threads. Both models must end with the same weights.
template <class Run> void on_two_ranks(const Model *models, Run &&run) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    const auto start = [&](int rank) {
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        run(rank, ctx, comm);
    };
    std::future<void> other = std::async(std::launch::async, start, 1);
    start(0);
    other.get();
    if (models[0].weights != models[1].weights) throw std::runtime_error("the ranks have different weights");
}

void onebit(Digest &digest) {
    Model models[] = {{{{"u", 5}, {"v", 130}}, 54321, 2000}, {{{"u", 5}, {"v", 130}}, 54321, 2001}};
    on_two_ranks(models, [&](int rank, const dsopt::context &ctx, dsopt::comm &comm) {
        dsopt::optimizer_options options;
        options.data = &comm;
        options.averages = true;
        dsopt::optimizer opt(ctx, options);
        dsopt::onebit_adam group;
        group.lr = 0.015625;
        group.freeze_step = 3;
        opt.add_group(group, models[rank].params);
        models[rank].train(opt, 6);
    });
    add_all(digest, models[0].weights);
}

dsopt::bf16 to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return dsopt::bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

/// The model of case 1 with bfloat16 parameters, which refer to `weights`.
Model bf16_model(std::vector<std::vector<dsopt::bf16>> &weights) {
    Model model({{"a", 1}, {"b", 7}, {"c", 4099}}, 12345, 1000);
    weights.resize(3);
    for (std::size_t i = 0; i < 3; ++i) {
        for (const float value : model.weights[i]) weights[i].push_back(to_bf16(value));
        model.params[i].tensor = dsopt::view(weights[i]);
    }
    return model;
}

void low_precision(Digest &digest) {
    std::vector<std::vector<dsopt::bf16>> weights;
    Model model = bf16_model(weights);
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.masters = dsopt::masters::remainder;
    options.seed = 7;
    dsopt::optimizer opt(ctx, options);
    dsopt::adamw group = adamw_group();
    group.exp_avg_format = dsopt::moment::e4m3;
    group.exp_avg_sq_format = dsopt::moment::bf16_random;
    opt.add_group(group, {model.params[0], model.params[1]});
    group.exp_avg_format = group.exp_avg_sq_format = dsopt::moment::q8;
    opt.add_group(group, {model.params[2]});
    model.train(opt, 10);
    add_all(digest, weights);
    add_state<std::int16_t>(digest, opt, "remainder");
    add_state<dsopt::f8_e4m3>(digest, opt, "exp_avg"); // a and b
    add_state<std::uint8_t>(digest, opt, "exp_avg");   // c
    add_state<float>(digest, opt, "exp_avg_scale");
    add_state<dsopt::bf16>(digest, opt, "exp_avg_sq");
    add_state<std::uint8_t>(digest, opt, "exp_avg_sq");
    add_state<float>(digest, opt, "exp_avg_sq_scale");
}

/// Moments of a rank of case `sharded`.
std::vector<float> part_of(dsopt::optimizer &opt, const char *name) {
    std::vector<float> part;
    for (std::int64_t i = 0; i < opt.state_count(); ++i) {
        const dsopt::state_entry entry = opt.state(i);
        if (std::strcmp(entry.name(), name) != 0) continue;
        std::vector<float> values(static_cast<std::size_t>(entry.numel()));
        opt.export_state(i, values);
        part.insert(part.end(), values.begin(), values.end());
    }
    return part;
}

void sharded(Digest &digest) {
    const auto make = [](std::uint32_t rank) { return Model({{"a", 6}, {"b", 9000}, {"c", 130}}, 54321, 3000 + rank); };
    Model models[] = {make(0), make(1)};
    std::vector<float> exp_avg[2], exp_avg_sq[2];
    on_two_ranks(models, [&](int rank, const dsopt::context &ctx, dsopt::comm &comm) {
        dsopt::optimizer_options options;
        options.data = &comm;
        options.shard = dsopt::shard::data;
        options.averages = true;
        options.max_norm = 1;
        dsopt::optimizer opt(ctx, options);
        opt.add_group(adamw_group(), models[rank].params);
        models[rank].train(opt, 5);
        exp_avg[rank] = part_of(opt, "exp_avg");
        exp_avg_sq[rank] = part_of(opt, "exp_avg_sq");
    });
    add_all(digest, models[0].weights);
    for (const std::vector<float> &part : exp_avg) digest.add(part);
    for (const std::vector<float> &part : exp_avg_sq) digest.add(part);
}

void resharded(Digest &digest) {
    const auto make = [] { return Model({{"a", 6}, {"b", 9000}, {"c", 130}}, 54321, 4000); };
    const std::vector<std::string> files = {"cpp0.safetensors", "cpp1.safetensors"}; // in the current folder
    Model models[] = {make(), make()};
    on_two_ranks(models, [&](int rank, const dsopt::context &ctx, dsopt::comm &comm) {
        dsopt::optimizer_options options;
        options.data = &comm;
        options.shard = dsopt::shard::data;
        dsopt::optimizer opt(ctx, options);
        opt.add_group(adamw_group(), models[rank].params);
        models[rank].train(opt, 3);
        opt.save(files[static_cast<std::size_t>(rank)]);
    });
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(adamw_group(), models[0].params);
    opt.load(files);
    models[0].train(opt, 3);
    add_all(digest, models[0].weights);
    add_state<float>(digest, opt, "exp_avg");
    add_state<float>(digest, opt, "exp_avg_sq");
    for (const std::string &file : files) std::remove(file.c_str());
}

void muon(Digest &digest) {
    Model model({{"qkv", 48 * 16}, {"w", 20 * 17}, {"bias", 130}}, 777, 888);
    model.params[0].dims = {48, 16};
    model.params[0].rows = model.params[0].cols = 16; // three matrices
    model.params[1].dims = {20, 17};
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    dsopt::muon matrices;
    matrices.lr = 0.015625;
    matrices.momentum = 0.9375;
    matrices.weight_decay = 0.125;
    opt.add_group(matrices, {model.params[0], model.params[1]});
    dsopt::adamw others;
    others.lr = 0.0078125;
    others.weight_decay = 0.25;
    others.eps = 0;
    opt.add_group(others, {model.params[2]});
    model.train(opt, 5);
    add_all(digest, model.weights);
    for (const char *const name : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) add_state<float>(digest, opt, name);
}

/// Of a multiple of 2^-10 from -0.5 to 0.5, which is exact.
dsopt::f16 to_f16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return dsopt::f16(value == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10)));
}

void accumulation(Digest &digest) {
    Model model({{"a", 1}, {"b", 7}, {"c", 4099}}, 12345, 5000);
    std::vector<std::vector<dsopt::f16>> weights(3);
    for (std::size_t i = 0; i < 3; ++i) {
        for (const float value : model.weights[i])
            weights[i].push_back(to_f16(std::floor(value * 1024) / 1024)); // the upper 10 bits
        model.params[i].tensor = dsopt::view(weights[i]);
    }
    dsopt::context ctx;
    dsopt::scaler_options scale;
    scale.init = 1024;
    scale.window = 2;
    dsopt::scaler scaler(ctx, scale);
    dsopt::optimizer_options options;
    options.scaler = &scaler;
    options.max_norm = 1;
    options.accumulate = true;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(adamw_group(), model.params);
    for (int s = 0; s < 8; ++s) {
        const float factor = static_cast<float>(scaler.info().scale);
        for (int micro = 0; micro < 3; ++micro) {
            model.fill_gradients();
            for (std::vector<float> &gradient : model.gradients)
                for (float &value : gradient) value *= factor;
            if (s == 3 && micro == 1) model.gradients[2][0] = std::numeric_limits<float>::infinity();
            opt.accumulate(model.grads);
        }
        opt.step_accumulated();
    }
    add_all(digest, weights);
    for (const char *const name : {"master", "exp_avg", "exp_avg_sq", "loss_scale"})
        add_state<float>(digest, opt, name);
}

void uncorrected(Digest &digest) {
    std::vector<std::vector<dsopt::bf16>> weights;
    Model model = bf16_model(weights);
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.masters = dsopt::masters::remainder;
    options.max_value = 0.25;
    dsopt::optimizer opt(ctx, options);
    dsopt::adamw group = adamw_group();
    group.eps = 0.001;
    group.eps_uncorrected = true;
    group.exp_avg_format = dsopt::moment::e4m3;
    group.exp_avg_sq_format = dsopt::moment::q8;
    opt.add_group(group, model.params);
    model.train(opt, 10);
    add_all(digest, weights);
    add_state<std::int16_t>(digest, opt, "remainder");
    add_state<dsopt::f8_e4m3>(digest, opt, "exp_avg");
    add_state<float>(digest, opt, "exp_avg_scale");
    add_state<std::uint8_t>(digest, opt, "exp_avg_sq");
    add_state<float>(digest, opt, "exp_avg_sq_scale");
}

} // namespace

int main() {
    constexpr std::pair<const char *, void (*)(Digest &)> cases[] = {
        {"adamw", adamw},         {"onebit", onebit}, {"low_precision", low_precision}, {"sharded", sharded},
        {"resharded", resharded}, {"muon", muon},     {"accumulation", accumulation},   {"uncorrected", uncorrected}};
    try {
        for (const auto &[name, run] : cases) {
            Digest digest;
            run(digest);
            std::printf("cpp %s %016llx\n", name, static_cast<unsigned long long>(digest.value()));
        }
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
