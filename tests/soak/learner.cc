// SPDX-License-Identifier: Apache-2.0
#include "learner.h"
#include "support/numbers.h"

namespace soak {
namespace {

constexpr size_t kSizes[] = {700, 1, 33, 0, 4100};
constexpr size_t kShardedSizes[] = {700, 1, 33, 0, 4100, 13000}; // four ranks have parts of the last one
constexpr float kNoise = 0.3f;

std::vector<size_t> sizes_of(const Course &course) {
    if (course.shard != 0) return {std::begin(kShardedSizes), std::end(kShardedSizes)};
    return {std::begin(kSizes), std::end(kSizes)};
}
bool is_family(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM || algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ||
           algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
}
double rate(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_LAMB ? 0.3 : algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB ? 0.1 : 0.03;
}

template <class T> std::vector<dsopt_tensor> list_of(std::vector<std::vector<T>> &arrays, int32_t dtype) {
    std::vector<dsopt_tensor> list;
    for (std::vector<T> &array : arrays) {
        const size_t numel = array.size() * sizeof(T) / test::size_of(dtype);
        list.push_back({array.empty() ? nullptr : array.data(), int64_t(numel), dtype, 0});
    }
    return list;
}

} // namespace

std::string Course::name() const {
    std::string text = test::name_of(algorithm);
    if (first_format != DSOPT_MOMENT_F32 || second_format != DSOPT_MOMENT_F32)
        text += " with formats " + std::to_string(first_format) + " and " + std::to_string(second_format);
    text += remainders ? " and remainders" : "";
    return text + (averages() ? ", sharded, averages" : shard != 0 ? ", sharded" : "");
}

Learner::Learner(const test::Context &context, const test::Comm &comm, int rank, const Course &course) :
    course_(course),
    rank_(rank),
    comm_(comm.get()) {
    test::Random random(course.seed);
    for (const size_t n : sizes_of(course)) {
        const size_t size = test::size_of(weight_dtype());
        weights_.emplace_back(n * size);
        for (size_t i = 0; i < n; ++i) test::store(&weights_.back()[i * size], weight_dtype(), 0.25f);
        grads_.emplace_back(n);
        goals_.push_back(random.floats(n));
    }
    const bool family = is_family(course.algorithm);
    const int32_t flags = comm == nullptr ? 0 : family ? int32_t(DSOPT_OPTIMIZER_AVERAGES) : course.shard;
    dsopt_optimizer_desc desc = test::desc_with(comm, DSOPT_COMPAT_NONE, uint32_t(flags));
    if (course.shard != 0) desc.max_norm = 50; // clips at first
    if (course.remainders) desc.masters = DSOPT_MASTERS_REMAINDER;
    desc.seed = course.seed;
    opt_ = test::make_optimizer(context, desc);
    dsopt_group group = test::make_group(course.algorithm, 0);
    group.lr = rate(course.algorithm);
    group.exp_avg_format = course.first_format;
    group.exp_avg_sq_format = course.second_format;
    if (family) group.freeze_step = course.steps / 5;
    if (course.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
        group.var_interval_steps = 4;
        group.local_interval_steps = course.steps / 3;
        group.max_local_interval = 4;
    }
    std::vector<dsopt_param> params;
    for (const dsopt_tensor &tensor : list_of(weights_, weight_dtype())) params.push_back(test::param_of(tensor));
    test::must(dsopt_optimizer_add_group(opt(), &group, params.data(), int64_t(params.size())));
}

float Learner::weight(size_t tensor, size_t index) const {
    return test::loaded(&weights_[tensor][index * test::size_of(weight_dtype())], weight_dtype());
}

dsopt_status Learner::step() {
    const int64_t now = steps();
    const double share = double(now) / double(course_.steps); // the rate decreases in the second half, to 0
    const double lr = rate(course_.algorithm) * std::min(1.0, 2 - 2 * share);
    test::must(dsopt_optimizer_set(opt(), 0, DSOPT_KEY_LR, std::max(lr, 0.0)));
    const int gradients_of = course_.shard != 0 ? 0 : rank_;
    test::Random random((course_.seed * 1000003 + uint64_t(now)) * 31 + uint64_t(gradients_of));
    for (size_t t = 0; t < grads_.size(); ++t) {
        const std::vector<float> noise = random.floats(grads_[t].size(), -kNoise, kNoise);
        for (size_t i = 0; i < noise.size(); ++i) grads_[t][i] = weight(t, i) - goals_[t][i] + noise[i];
    }
    const std::vector<dsopt_tensor> list = list_of(grads_, DSOPT_DTYPE_F32);
    // The 1-bit family averages in the engine, and sharded ranks have the same gradients.
    if (comm_ != nullptr && !is_family(course_.algorithm) && course_.shard == 0) {
        const dsopt_status status =
            dsopt_comm_all_reduce(comm_, list.data(), int64_t(list.size()), DSOPT_OP_MEAN, nullptr);
        if (status != DSOPT_OK) return status;
    }
    DSOPT_NEW(dsopt_step, step);
    step.grads = list.data();
    step.count = int64_t(list.size());
    return dsopt_optimizer_step(opt(), &step);
}

dsopt_status Learner::save(const std::string &path) {
    DSOPT_NEW(dsopt_io, io);
    io.flags = DSOPT_IO_PARAMS;
    return dsopt_optimizer_save(opt(), path.c_str(), &io);
}
dsopt_status Learner::load(const std::vector<std::string> &files, uint32_t flags) {
    DSOPT_NEW(dsopt_io, io);
    io.flags = int32_t(DSOPT_IO_PARAMS | flags);
    if (files.size() == 1) return dsopt_optimizer_load(opt(), files[0].c_str(), &io);
    std::vector<const char *> paths;
    for (const std::string &file : files) paths.push_back(file.c_str());
    io.files = int32_t(paths.size());
    io.paths = paths.data();
    return dsopt_optimizer_load(opt(), nullptr, &io);
}
int64_t Learner::steps() const {
    double calls = 0;
    test::must(dsopt_optimizer_get(opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, &calls));
    return int64_t(calls);
}
double Learner::loss() const {
    double sum = 0, count = 0;
    for (size_t t = 0; t < goals_.size(); ++t)
        for (size_t i = 0; i < goals_[t].size(); ++i, ++count) {
            const double off = double(weight(t, i)) - double(goals_[t][i]);
            sum += off * off;
        }
    return sum / count;
}

} // namespace soak
