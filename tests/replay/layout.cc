// SPDX-License-Identifier: Apache-2.0
#include "layout.h"
#include "engine.h"
#include <algorithm>
#include <rapidjson/document.h>

namespace replay {
namespace {

// RapidJSON's default number parser may be off by some units in the last place; a beta must be the recorded double.
constexpr unsigned parse_flags =
    rapidjson::kParseIterativeFlag | rapidjson::kParseFullPrecisionFlag | rapidjson::kParseValidateEncodingFlag;

rapidjson::Document parse_array(GoldenFile &file, const char *key) {
    rapidjson::Document document;
    document.Parse<parse_flags>(file.text(key).c_str());
    if (document.HasParseError() || !document.IsArray()) fail("metadata %s: not a JSON array", key);
    return document;
}

double scalar(const rapidjson::Value &value, const std::string &key) {
    if (value.IsBool()) return value.GetBool() ? 1 : 0;
    if (!value.IsNumber()) fail("metadata groups: %s is neither a number nor a boolean", key.c_str());
    return value.GetDouble();
}

} // namespace

std::vector<int32_t> dtype_list(GoldenFile &file, const std::string &key, int64_t params) {
    const std::string &text = file.text(key);
    std::vector<int32_t> dtypes;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t comma = std::min(text.find(',', begin), text.size());
        const std::string word = text.substr(begin, comma - begin);
        begin = comma + 1;
        const int32_t dtype = word == "f32"    ? DSOPT_DTYPE_F32
                              : word == "f16"  ? DSOPT_DTYPE_F16
                              : word == "bf16" ? DSOPT_DTYPE_BF16
                                               : 0;
        if (dtype == 0) fail("metadata %s: '%s' is not a dtype that the engine steps", key.c_str(), word.c_str());
        dtypes.push_back(dtype);
    }
    if (dtypes.size() == 1) dtypes.resize(size_t(params), dtypes[0]);
    if (int64_t(dtypes.size()) != params)
        fail("metadata %s: must have one dtype, or one dtype per parameter", key.c_str());
    return dtypes;
}

Layout::Layout(GoldenFile &file) : file_(file) {
    shapes_ = replay::read_shapes(file_, "param_shapes");
    for (const std::vector<int64_t> &shape : shapes_) {
        items_.push_back("p" + std::to_string(items_.size()));
        numels_.push_back(product(shape));
    }
    read_groups();
}

void Layout::read_groups() {
    std::set<int64_t> listed;
    const auto document = parse_array(file_, "groups");
    for (const auto &entry : document.GetArray()) {
        if (!entry.IsObject() || !entry.HasMember("params")) fail("metadata groups: not a list of objects with params");
        Group group;
        const auto set = [&group](const std::string &name, const std::string &key, const rapidjson::Value &value) {
            if (!group.overrides.emplace(key, scalar(value, name)).second)
                fail("metadata groups: %s is a duplicate key", name.c_str());
        };
        for (const auto &member : entry.GetObject()) {
            const std::string key = member.name.GetString();
            if (key == "params") {
                if (!member.value.IsArray()) fail("metadata groups: params must be a list");
                for (const auto &index : member.value.GetArray()) {
                    if (!index.IsInt64() || index.GetInt64() < 0 || index.GetInt64() >= param_count())
                        fail("metadata groups: an entry of params is not the index of a parameter");
                    if (!listed.insert(index.GetInt64()).second)
                        fail("metadata groups: parameter %lld is listed twice", (long long)index.GetInt64());
                    group.params.push_back(index.GetInt64());
                    order_.push_back(index.GetInt64());
                }
            } else if (key == "betas") {
                if (!member.value.IsArray() || member.value.Size() != 2)
                    fail("metadata groups: betas must be two numbers");
                set(key, "beta1", member.value[0]);
                set(key, "beta2", member.value[1]);
            } else if (member.value.IsString()) {
                if (!group.words.emplace(key, member.value.GetString()).second)
                    fail("metadata groups: %s is a duplicate key", key.c_str());
            } else {
                set(key, key, member.value);
            }
        }
        groups_.push_back(std::move(group));
    }
    if (listed.size() != shapes_.size())
        fail("metadata groups: %zu of %zu parameters are in no group", shapes_.size() - listed.size(), shapes_.size());
}

double Layout::hyper(size_t index, const std::string &key) {
    Group &group = groups_[index];
    const auto found = group.overrides.find(key);
    // The top-level value is read even if it is overridden, so that it counts as understood.
    const double common = file_.has(key) || found == group.overrides.end() ? file_.number(key) : 0;
    group.read.insert(key);
    return found == group.overrides.end() ? common : found->second;
}

bool Layout::hyper_flag(size_t index, const std::string &key, bool default_value) {
    if (!file_.has(key) && groups_[index].overrides.count(key) == 0) return default_value;
    const double value = hyper(index, key);
    if (value != 0 && value != 1) fail("group %zu: %s is neither 0 nor 1", index, key.c_str());
    return value == 1;
}

std::string Layout::hyper_word(size_t index, const std::string &key) {
    Group &group = groups_[index];
    const auto found = group.words.find(key);
    const std::string &common = file_.text(key);
    group.read.insert(key);
    return found == group.words.end() ? common : found->second;
}

void Layout::finish() const {
    for (const Group &group : groups_)
        for (const auto &[key, word] : group.words)
            if (group.read.count(key) == 0)
                fail("the override %s = '%s' of a group is not understood by this algorithm's replay", key.c_str(),
                     word.c_str());
    for (size_t i = 0; i < groups_.size(); ++i)
        for (const auto &[key, value] : groups_[i].overrides)
            if (groups_[i].read.count(key) == 0)
                fail("group %zu: the override %s = %g is not understood by this algorithm's replay", i, key.c_str(),
                     value);
}

dsopt_param Layout::param(int64_t index, const dsopt_tensor &tensor) const {
    dsopt_param param{};
    param.tensor = tensor;
    param.name = item(index).c_str();
    param.dims = shape(index).data();
    param.ndim = int32_t(shape(index).size());
    return param;
}

int64_t product(const std::vector<int64_t> &shape) {
    int64_t numel = 1;
    for (const int64_t dim : shape) numel *= dim;
    return numel;
}

std::vector<int64_t> read_integers(GoldenFile &file, const char *key) {
    std::vector<int64_t> list;
    const auto document = parse_array(file, key);
    for (const auto &entry : document.GetArray()) {
        if (!entry.IsInt64()) fail("metadata %s: not a list of integers", key);
        list.push_back(entry.GetInt64());
    }
    return list;
}

std::vector<std::vector<int64_t>> read_shapes(GoldenFile &file, const char *key) {
    std::vector<std::vector<int64_t>> shapes;
    const auto document = parse_array(file, key);
    for (const auto &entry : document.GetArray()) {
        if (!entry.IsArray()) fail("metadata %s: not a list of lists", key);
        int64_t numel = 1;
        std::vector<int64_t> shape;
        for (const auto &dim : entry.GetArray()) {
            if (!dim.IsInt64() || dim.GetInt64() < 0 || __builtin_mul_overflow(numel, dim.GetInt64(), &numel))
                fail("metadata %s: malformed shape", key);
            shape.push_back(dim.GetInt64());
        }
        shapes.push_back(std::move(shape));
    }
    return shapes;
}

int64_t read_ranks(GoldenFile &file) {
    const int64_t ranks = file.integer("world_size");
    if (ranks < 1 || ranks > 64) fail("metadata world_size: %lld ranks", (long long)ranks);
    return ranks;
}

int64_t read_steps(GoldenFile &file) {
    const int64_t steps = file.integer("steps");
    if (steps < 1) fail("metadata steps: nothing is recorded");
    return steps;
}

void expect_one_rank(GoldenFile &file) {
    if (file.integer("world_size") != 1) fail("metadata world_size: this algorithm has one rank");
}

dsopt_group common_group(Layout &layout, size_t index, int32_t algorithm) {
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, algorithm), "dsopt_group_init");
    group.lr = layout.hyper(index, "lr");
    group.beta1 = layout.hyper(index, "beta1");
    group.beta2 = layout.hyper(index, "beta2");
    group.eps = layout.hyper(index, "eps");
    group.weight_decay = layout.hyper(index, "weight_decay");
    if (!layout.hyper_flag(index, "bias_correction", true)) group.flags |= DSOPT_GROUP_NO_BIAS_CORRECTION;
    return group;
}

dsopt_group adam_group(Layout &layout, size_t index) {
    const bool decoupled = layout.common_flag("adam_w_mode", true);
    return common_group(layout, index, decoupled ? DSOPT_ALGORITHM_ADAMW : DSOPT_ALGORITHM_ADAM);
}

dsopt_group lamb_group(Layout &layout, size_t index) {
    dsopt_group group = common_group(layout, index, DSOPT_ALGORITHM_LAMB);
    group.min_trust = layout.hyper(index, "min_coeff");
    group.max_trust = layout.hyper(index, "max_coeff");
    if (layout.common_flag("eps_inside_sqrt", false)) group.flags |= DSOPT_GROUP_EPS_INSIDE_SQRT;
    return group;
}

} // namespace replay
