// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"
#include "optimizer/group.h"
#include "optimizer/onebit.h"
#include <algorithm>
#include <unordered_map>

namespace dsopt {
namespace {

constexpr char kFormatVersion[] = "1", kShardedVersion[] = "2";

/// Calls f(name, number) for every number that a file stores per group, for writing and for reading.
template <class Group, class F> void for_fields(Group &group, F &&f) {
    const RuleInfo &info = info_of(group.algorithm);
    for (const GroupField &field : kGroupFields)
        if (field.saved_with == 0 || (info.fields & field.saved_with))
            with_value(field, group, [&](auto &value) { f(field.name, value); });
    for (const GroupInt &field : kGroupInts)
        if (info.fields & field.field) f(field.name, group.*field.value);
}
template <class Rules, class F> void for_scaler_fields(Rules &rules, F &&f) {
    f("scaler.factor", rules.factor);
    f("scaler.min", rules.min);
    f("scaler.max", rules.max);
    f("scaler.window", rules.window);
    f("scaler.hysteresis", rules.hysteresis);
    f("scaler.flags", rules.flags);
}

/// Returns the shortest text that converts back to the same number, independent of the locale.
template <class T> std::string to_text(T value) {
    char text[32];
    return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// Runs a check of arguments on values of a file, and converts its error to FORMAT.
template <class Check> void check_saved(const std::string &what, const Check &check) {
    try {
        check();
    } catch (const Error &e) { throw Error(DSOPT_ERR_FORMAT, "%s of the checkpoint: %s", what.c_str(), e.what()); }
}

/// Returns the parameter names in order, each after its length, because names may contain any character.
std::string join_names(const std::vector<Param> &params) {
    std::string text;
    for (const Param &param : params) text += to_text(param.name.size()) + ":" + param.name;
    return text;
}
std::vector<std::string> split_names(const std::string &text) {
    std::vector<std::string> names;
    for (size_t at = 0; at < text.size();) {
        size_t length = 0;
        const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), length);
        const size_t begin = size_t(end - text.data()) + 1;
        if (error != std::errc() || begin > text.size() || *end != ':' || length > text.size() - begin)
            throw Error(DSOPT_ERR_FORMAT, "field 'params' of the checkpoint is damaged at byte %zu", at);
        names.emplace_back(text, begin, length);
        at = begin + length;
    }
    return names;
}

std::string join_dims(const std::vector<int64_t> &dims) {
    std::string text;
    for (const int64_t dim : dims) text += (text.empty() ? "" : ",") + to_text(dim);
    return text;
}

/// Returns the text for the matrices of a parameter; "" if the tensor has none, or is one matrix by its own dims.
std::string blocks_text(const Param &param) {
    const MatrixShape &shape = param.matrix;
    const bool whole = param.dims.size() == 2 && param.dims[0] == shape.rows && param.dims[1] == shape.cols;
    return shape.rows == 0 || whole ? "" : to_text(shape);
}
/// Returns the flags of a parameter that determine what its state means.
int32_t saved_flags(const Param &param) { return param.flags & DSOPT_PARAM_ROWS_ARE_INPUTS; }

/// Throws MISMATCH if a parameter of the file has other matrix blocks, or has other flags.
void check_blocks(const Fields &fields, const Param &param) {
    const std::string blocks = "blocks." + param.name, flags = "param_flags." + param.name, here = blocks_text(param);
    const std::string saved = fields.has(blocks) ? fields.text(blocks) : "";
    if (saved != here)
        throw Error(DSOPT_ERR_MISMATCH, "parameter %s of the checkpoint has matrix blocks of %s, here of %s",
                    quoted(param.name).c_str(), saved.empty() ? "its own dims" : quoted(saved).c_str(),
                    here.empty() ? "its own dims" : quoted(here).c_str());
    if ((fields.has(flags) ? fields.number<int32_t>(flags) : 0) != saved_flags(param))
        throw Error(DSOPT_ERR_MISMATCH,
                    "parameter %s of the checkpoint and of this optimizer differ in ROWS_ARE_INPUTS",
                    quoted(param.name).c_str());
}

/// Returns the group of each parameter; "" if the parameters are in the order of their groups, so that the file has the
/// form of earlier versions, which required that order.
std::string join_groups(const std::vector<Param> &params) {
    if (std::is_sorted(params.begin(), params.end(), [](const Param &a, const Param &b) { return a.group < b.group; }))
        return "";
    std::string text;
    for (const Param &param : params) text += to_text(param.group) + ",";
    return text;
}
/// Returns the group of each of the file's `count` parameters. Throws FORMAT unless the groups' sizes add up to
/// `count`.
std::vector<size_t> split_groups(const Fields &fields, const std::vector<int64_t> &sizes, size_t count) {
    constexpr char key[] = "param_groups";
    std::vector<size_t> groups;
    groups.reserve(count);
    if (!fields.has(key)) {
        for (size_t i = 0; i < sizes.size(); ++i) groups.insert(groups.end(), size_t(sizes[i]), i);
    } else {
        const std::string &text = fields.text(key);
        std::vector<int64_t> left = sizes;
        for (const char *at = text.data(), *const end = at + text.size(); at != end;) {
            size_t group = 0;
            const auto [next, error] = std::from_chars(at, end, group);
            if (error != std::errc() || next == end || *next != ',' || group >= left.size() || left[group]-- == 0)
                throw Error(DSOPT_ERR_FORMAT, "field '%s' of the checkpoint is damaged at byte %td", key,
                            at - text.data());
            groups.push_back(group);
            at = next + 1;
        }
    }
    if (groups.size() != count)
        throw Error(DSOPT_ERR_FORMAT, "the groups of the checkpoint have %zu parameters, its list has %zu",
                    groups.size(), count);
    return groups;
}

/// Checks that the saved groups have the number and the algorithms of the optimizer's groups. Returns the optimizer's
/// groups with the saved hyper-parameters, and the saved sizes.
std::vector<dsopt_group> read_groups(const Optimizer &optimizer, const Fields &fields, std::vector<int64_t> &sizes) {
    const auto count = fields.number<int64_t>("groups");
    if (count != int64_t(optimizer.groups().size()))
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has %lld groups, this optimizer has %zu", ll(count),
                    optimizer.groups().size());
    std::vector<dsopt_group> groups = optimizer.groups();
    for (size_t i = 0; i < groups.size(); ++i) {
        const std::string prefix = "group." + std::to_string(i) + ".";
        const std::string &saved = fields.text(prefix + "algorithm");
        const RuleInfo &info = info_of(groups[i].algorithm);
        if (saved != info.name)
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint is %s, here it is %s", i,
                        quoted(saved).c_str(), info.name);
        for_fields(groups[i], [&](const char *name, auto &value) { fields.read(prefix + name, value); });
        const auto flags = fields.number<uint32_t>(prefix + "flags");
        if ((flags ^ groups[i].flags) & DSOPT_GROUP_NON_FREEZE) // the saved state depends on this flag
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint and of this optimizer differ in NON_FREEZE",
                        i);
        groups[i].flags = flags;
        groups[i].ns_dtype = optimizer.groups()[i].ns_dtype; // it determines the size of the workspace
        sizes.push_back(fields.number<int64_t>(prefix + "params"));
        check_saved("group " + std::to_string(i), [&] { check_group(groups[i], facts_of(optimizer.desc())); });
        if (const MomentInfo *const moment = first_difference(moments_of(groups[i]), moments_of(optimizer.groups()[i])))
            throw Error(DSOPT_ERR_MISMATCH, "one of group %zu of the checkpoint and of this optimizer has no %s", i,
                        moment->name);
    }
    check_saved("groups", [&] { (void)check_family(groups); });
    return groups;
}

/// Returns the index in this optimizer of each parameter of the file. Throws MISMATCH unless names and groups agree.
std::vector<int64_t> match_params(const Optimizer &optimizer, const Fields &fields, const std::vector<int64_t> &sizes) {
    const std::vector<std::string> names = split_names(fields.text("params"));
    const std::vector<Param> &params = optimizer.params();
    std::unordered_map<std::string, int64_t> indices;
    for (size_t i = 0; i < params.size(); ++i) indices.emplace(params[i].name, int64_t(i));
    for (size_t i = 0; i < sizes.size(); ++i)
        if (sizes[i] < 0 || sizes[i] > int64_t(names.size()))
            throw Error(DSOPT_ERR_FORMAT, "group %zu of the checkpoint has %lld of its %zu parameters", i, ll(sizes[i]),
                        names.size());
    const std::vector<size_t> saved_groups = split_groups(fields, sizes, names.size());
    std::vector<int64_t> order;
    for (const std::string &name : names) {
        const size_t group = saved_groups[order.size()];
        const auto found = indices.find(name);
        if (found == indices.end() || found->second < 0)
            throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has a parameter %s, this optimizer has none of that name",
                        quoted(name).c_str());
        if (size_t(params[size_t(found->second)].group) != group)
            throw Error(DSOPT_ERR_MISMATCH, "parameter %s is in group %lld of the checkpoint and in group %d here",
                        quoted(name).c_str(), ll(group), params[size_t(found->second)].group);
        order.push_back(found->second);
        found->second = -1; // each name may occur once
    }
    for (const Param &param : params)
        if (indices[param.name] >= 0)
            throw Error(DSOPT_ERR_MISMATCH, "parameter %s is not in the checkpoint", quoted(param.name).c_str());
    for (size_t i = 0; i < sizes.size(); ++i) {
        const auto here =
            std::count_if(params.begin(), params.end(), [&](const Param &param) { return size_t(param.group) == i; });
        if (sizes[i] != here)
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint has %lld parameters, here it has %lld", i,
                        ll(sizes[i]), ll(here));
    }
    return order;
}

} // namespace

bool is_hyper_field(const std::string &key) {
    const auto ends_with = [&](const char *end) {
        const std::string suffix = end;
        return key.size() > suffix.size() && key.compare(key.size() - suffix.size(), suffix.size(), suffix) == 0;
    };
    if (key.rfind("group.", 0) == 0) return !ends_with(".algorithm") && !ends_with(".params");
    return key == "max_norm" || key == "max_value" || key.rfind("scaler.", 0) == 0;
}

bool is_in_pieces(const Optimizer &optimizer, size_t param) {
    return optimizer.shards() && (optimizer.parts()->is_split(param) || optimizer.params()[param].numel > kFilePiece);
}

Metadata metadata_of(const Optimizer &optimizer, const std::string &save_id) {
    const DataRank local = optimizer.data_rank();
    Metadata metadata{{"format", "dsopt"},
                      {"format_version", optimizer.shards() ? kShardedVersion : kFormatVersion},
                      {"rank", to_text(local.rank)},
                      {"ranks", to_text(local.ranks)},
                      {"calls", to_text(optimizer.calls())},
                      {"max_norm", to_text(optimizer.desc().max_norm)},
                      {"max_value", to_text(optimizer.desc().max_value)},
                      {"groups", to_text(optimizer.groups().size())}};
    if (local.node_ranks > 1) metadata.emplace_back("node_ranks", to_text(local.node_ranks));
    // Error feedback and `active` follow the vector of 4,096-element blocks; before 0.3, another one.
    if (optimizer.onebit() != nullptr && !optimizer.compat()) metadata.emplace_back("layout", kVectorLayout);
    if (optimizer.shards()) {
        metadata.emplace_back("shard", sharding_name(optimizer.parts()->sharding()));
        if (optimizer.desc().bucket != 0) metadata.emplace_back("bucket", to_text(optimizer.desc().bucket));
        metadata.emplace_back("save_id", save_id);
        for (size_t i = 0; i < optimizer.params().size(); ++i) {
            const Param &param = optimizer.params()[i];
            if (is_in_pieces(optimizer, i)) metadata.emplace_back("shape." + param.name, join_dims(param.dims));
        }
    }
    for (size_t i = 0; i < optimizer.groups().size(); ++i) {
        const dsopt_group &group = optimizer.groups()[i];
        const std::string prefix = "group." + std::to_string(i) + ".";
        const auto in_group = [&](const Param &param) { return size_t(param.group) == i; };
        metadata.emplace_back(prefix + "algorithm", info_of(group.algorithm).name);
        for_fields(group, [&](const char *name, auto value) { metadata.emplace_back(prefix + name, to_text(value)); });
        // Only for readers of the file: a load follows the dtypes of the tensors.
        for (const auto &[key, format] :
             {std::pair{"exp_avg_format", group.exp_avg_format}, {"exp_avg_sq_format", group.exp_avg_sq_format}})
            if (format != DSOPT_MOMENT_F32) metadata.emplace_back(prefix + key, kMomentFormats[format].key);
        metadata.emplace_back(prefix + "flags", to_text(group.flags));
        metadata.emplace_back(prefix + "params",
                              to_text(std::count_if(optimizer.params().begin(), optimizer.params().end(), in_group)));
    }
    metadata.emplace_back("params", join_names(optimizer.params()));
    for (const Param &param : optimizer.params()) {
        if (std::string blocks = blocks_text(param); !blocks.empty())
            metadata.emplace_back("blocks." + param.name, std::move(blocks));
        if (saved_flags(param) != 0) metadata.emplace_back("param_flags." + param.name, to_text(saved_flags(param)));
    }
    if (std::string list = join_groups(optimizer.params()); !list.empty())
        metadata.emplace_back("param_groups", std::move(list));
    if (optimizer.desc().flags & DSOPT_OPTIMIZER_ACCUMULATE) {
        std::string digits;
        for (const Param &param : optimizer.params()) digits += param.accumulated ? '1' : '0';
        metadata.emplace_back("accumulated", std::move(digits));
    }
    if (const auto &scaler = optimizer.attachments().scaler) {
        const ScalerRules rules = scaler->rules();
        for_scaler_fields(rules, [&](const char *name, auto value) { metadata.emplace_back(name, to_text(value)); });
    }
    return metadata;
}

uint64_t longest_header(const Optimizer &optimizer) {
    // A byte of a name may be written as \u00xx. A tensor's name occurs twice: with its checksum, and with its dtype,
    // shape and offsets. A parameter has at most the state tensors of all algorithms and the tensor of the parameter
    // itself, and its name occurs in the list of parameters.
    constexpr uint64_t escaped = 6, suffix = 32, numbers = 512, tensors_of_param = 16, tensors_of_optimizer = 32;
    constexpr uint64_t group_bytes = 4096, other_bytes = 65536;
    const auto tensor_bytes = [](uint64_t name) { return 2 * escaped * (name + suffix) + numbers; };
    uint64_t bytes = other_bytes + tensors_of_optimizer * tensor_bytes(0) + optimizer.groups().size() * group_bytes;
    for (const Param &param : optimizer.params()) {
        const uint64_t pieces = 1 + uint64_t(param.numel / kFilePiece); // of sharded state, and the shape
        bytes += pieces * tensors_of_param * tensor_bytes(param.name.size()) + escaped * param.name.size() + suffix +
                 3 * tensor_bytes(param.name.size()); // dims, blocks and flags
    }
    return std::min(bytes, SafetensorsReader::kLongestHeader);
}

SavedOptimizer read_optimizer(const Optimizer &optimizer, const Fields &fields) {
    const char *const version = fields.has("shard") ? kShardedVersion : kFormatVersion;
    if (fields.text("format_version") != version)
        throw Error(DSOPT_ERR_FORMAT, "the checkpoint has format version %s, this library reads %s of such files",
                    quoted(fields.text("format_version")).c_str(), version);
    SavedOptimizer saved;
    std::vector<int64_t> sizes;
    saved.groups = read_groups(optimizer, fields, sizes);
    saved.max_norm = fields.number<double>("max_norm");
    saved.calls = fields.number<int64_t>("calls");
    saved.max_value = fields.number<double>("max_value");
    check_saved("metadata", [&] {
        check_max_norm(saved.max_norm, "max_norm");
        check_options<At::optimizer>(facts_of(optimizer.desc()).add(facts::max_norm, saved.max_norm > 0));
        check_max_value(saved.max_value, "max_value");
        require_in(0, kMaxCalls, "calls", saved.calls);
    });
    saved.order = match_params(optimizer, fields, sizes);
    for (const Param &param : optimizer.params()) {
        check_blocks(fields, param);
        const std::string key = "shape." + param.name;
        if (!fields.has(key) || param.dims.size() < 2 || fields.text(key).find(',') == std::string::npos) continue;
        if (fields.text(key) != join_dims(param.dims))
            throw Error(DSOPT_ERR_MISMATCH, "parameter %s of the checkpoint has another shape of the same size",
                        quoted(param.name).c_str());
    }
    if (optimizer.onebit() != nullptr && !std::is_sorted(saved.order.begin(), saved.order.end()))
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has the parameters in another order, and state of the 1-bit "
                                        "family depends on the order");
    return saved;
}

ScalerRules read_scaler_rules(const Fields &fields, const ScalerRules &live) {
    constexpr uint32_t from_live = DSOPT_SCALER_STATIC | DSOPT_SCALER_SHARED;
    constexpr uint32_t known =
        from_live | DSOPT_SCALER_REFILL | DSOPT_SCALER_FAIL_AT_MIN | DSOPT_SCALER_GROWTH_AT_WINDOW;
    ScalerRules rules{};
    for_scaler_fields(rules, [&](const char *name, auto &value) { fields.read(name, value); });
    const uint32_t flags = rules.flags;
    if (flags & ~known)
        throw Error(DSOPT_ERR_FORMAT, "field 'scaler.flags' of the checkpoint has unknown bits: 0x%x", flags);
    rules.flags = (flags & ~from_live) | (live.flags & from_live);
    if ((flags ^ live.flags) & DSOPT_SCALER_STATIC)
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has a %s loss scale, this optimizer a %s one",
                    flags & DSOPT_SCALER_STATIC ? "static" : "dynamic",
                    live.flags & DSOPT_SCALER_STATIC ? "static" : "dynamic");
    check_saved("scaler", [&] { Scaler::check(rules); });
    return rules;
}

std::string read_accumulated(const Fields &fields, const std::vector<int64_t> &order) {
    const std::string &digits = fields.text("accumulated");
    if (digits.size() != order.size())
        throw Error(DSOPT_ERR_FORMAT, "field 'accumulated' of the checkpoint has a wrong length");
    std::string accumulated(digits.size(), '0');
    for (size_t i = 0; i < order.size(); ++i) accumulated[size_t(order[i])] = digits[i];
    return accumulated;
}

TensorEntry tensor_of(const Optimizer &optimizer, const StateEntry &entry) {
    const bool remainder = entry.kind == StateKind::remainder; // files have the masters
    const int32_t dtype = remainder ? int32_t(DSOPT_DTYPE_F32) : entry.dtype;
    const std::string name = std::string(".") + (remainder ? "master" : entry.name());
    const uint64_t bytes = uint64_t(entry.whole) * dtype_size(dtype);
    if (entry.param < 0) return {"optimizer" + name, dtype, {entry.whole}, bytes};
    const Param &param = optimizer.params()[size_t(entry.param)];
    return {param.name + name, dtype, is_scale(entry.kind) ? std::vector<int64_t>{entry.whole} : param.dims, bytes};
}

TensorEntry tensor_of(const Param &param) {
    return {param.name + ".param", param.dtype, param.dims, uint64_t(param.numel) * dtype_size(param.dtype)};
}

void check_shape(const TensorEntry &saved, const TensorEntry &wanted) {
    if (saved.shape.size() > 1 && wanted.shape.size() > 1 && saved.shape != wanted.shape)
        throw Error(DSOPT_ERR_MISMATCH, "tensor %s of the checkpoint has another shape of the same size",
                    quoted(wanted.name).c_str());
}

size_t find_tensor(const SafetensorsReader &file, const TensorEntry &wanted) {
    const auto name = [&] { return quoted(wanted.name); };
    const size_t index = file.find(wanted.name);
    if (index == SafetensorsReader::npos)
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has no tensor %s", name().c_str());
    const TensorEntry &tensor = file.tensors()[index];
    if (tensor.dtype != wanted.dtype)
        throw Error(DSOPT_ERR_MISMATCH, "tensor %s of the checkpoint has dtype %s, here it is %s", name().c_str(),
                    dtype_name(tensor.dtype), dtype_name(wanted.dtype));
    if (tensor.bytes != wanted.bytes)
        throw Error(DSOPT_ERR_MISMATCH, "tensor %s of the checkpoint has %zu bytes, here it has %zu", name().c_str(),
                    size_t(tensor.bytes), size_t(wanted.bytes));
    check_shape(tensor, wanted);
    return index;
}

} // namespace dsopt
