// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_io.h"
#include "base/parallel.h"
#include "checkpoint/rank_files.h"
#include "rules/group.h"
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <unordered_map>

namespace dsopt {
namespace {

constexpr char kFormatVersion[] = "1";

/// What is called what in the metadata beside kGroupFields, for both directions.
struct NamedField {
    const char *name;
    double dsopt_group::*value;
};
// The 1-bit family's: only there.
constexpr NamedField kTrustFields[] = {{"trust_beta", &dsopt_group::trust_beta},
                                       {"trust_threshold", &dsopt_group::trust_threshold},
                                       {"trust_min_change", &dsopt_group::trust_min_change},
                                       {"trust_max_change", &dsopt_group::trust_max_change}};
struct Count {
    const char *name;
    int64_t dsopt_group::*value;
};
constexpr Count kCounts[] = {{"freeze_step", &dsopt_group::freeze_step},
                             {"var_interval_steps", &dsopt_group::var_interval_steps},
                             {"local_interval_steps", &dsopt_group::local_interval_steps},
                             {"max_local_interval", &dsopt_group::max_local_interval}};

/// Whether a file has a hyper-parameter of a group.
bool is_saved(const GroupField &field, const RuleInfo &info) {
    return field.always_saved || (info.fields & field.field);
}

/// The shortest text that reads back as the same number, whatever the locale.
template <class T> std::string to_text(T value) {
    char text[32];
    return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string param_tensor_name(const Param &param) { return param.name + ".param"; }

/// Parameter names in order, each behind its length: names may hold any character.
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

/// The group of each parameter, where the parameters do not stand in the order of the groups; else "", and the file is
/// as it was before they could.
std::string join_groups(const std::vector<Param> &params) {
    if (std::is_sorted(params.begin(), params.end(), [](const Param &a, const Param &b) { return a.group < b.group; }))
        return "";
    std::string text;
    for (const Param &param : params) text += to_text(param.group) + ",";
    return text;
}
/// Of as many parameters as the groups' sizes add up to.
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

void check_io(const char *path, const dsopt_io &io, bool callback, uint32_t known) {
    if (io.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.flags has bits that do not fit here: 0x%x", io.flags & ~known);
    if (io.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.reserved is %u, must be 0", io.reserved);
    if (io.files < 0 || io.files > 65536)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.files is %d, not in [0, 65536]", io.files);
    if (io.reserved2 != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.reserved2 is %d, must be 0", io.reserved2);
    if (io.files == 0) {
        if (io.paths != nullptr || io.users != nullptr || io.totals != nullptr)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.paths, users or totals without dsopt_io.files");
        if ((path == nullptr) != callback)
            throw Error(DSOPT_ERR_ARGUMENT,
                        callback ? "a path and a callback: which one?" : "neither a path nor a callback");
        return;
    }
    if (path != nullptr) throw Error(DSOPT_ERR_ARGUMENT, "a path and dsopt_io.files: which one?");
    if ((io.paths == nullptr) != callback || (io.users != nullptr) != callback || (io.totals != nullptr) != callback)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.files needs either paths, or read with users and totals");
    for (int32_t i = 0; i < io.files; ++i)
        if (io.paths != nullptr && io.paths[i] == nullptr)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.paths[%d] is NULL", i);
}

/// A tensor between file and memory.
struct Transfer {
    size_t index;  // in the file
    int64_t entry; // in the state list, -1: the parameter at `memory`
    void *memory;
    size_t bytes;
    bool per_param;           // one element a parameter, in the file's order of parameters
    std::vector<char> made{}; // what is in no file as it is wanted; then `index` means nothing
    bool from_file() const { return made.empty(); }
};

/// Saved groups against live ones: the same number, algorithms and sizes. Returns them with the saved hyper-parameters.
std::vector<dsopt_group> read_groups(const Optimizer &optimizer, const Fields &fields, std::vector<int64_t> &sizes) {
    const auto count = fields.number<int64_t>("groups");
    if (count != int64_t(optimizer.groups().size()))
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has %lld groups, this optimizer has %zu",
                    static_cast<long long>(count), optimizer.groups().size());
    std::vector<dsopt_group> groups = optimizer.groups();
    for (size_t i = 0; i < groups.size(); ++i) {
        const std::string prefix = "group." + std::to_string(i) + ".";
        const std::string &saved = fields.text(prefix + "algorithm");
        const RuleInfo &info = info_of(groups[i].algorithm);
        if (saved != info.name)
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint is %.40s, here it is %s", i, saved.c_str(),
                        info.name);
        for (const GroupField &field : kGroupFields)
            if (is_saved(field, info)) groups[i].*field.value = fields.number<double>(prefix + field.name);
        if (is_onebit(groups[i].algorithm)) {
            for (const NamedField &field : kTrustFields)
                groups[i].*field.value = fields.number<double>(prefix + field.name);
            for (const Count &count : kCounts) groups[i].*count.value = fields.number<int64_t>(prefix + count.name);
        }
        const auto flags = fields.number<uint32_t>(prefix + "flags");
        if ((flags ^ groups[i].flags) & DSOPT_GROUP_NON_FREEZE) // it decided what is compressed
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint and of this optimizer differ in NON_FREEZE",
                        i);
        groups[i].flags = flags;
        sizes.push_back(fields.number<int64_t>(prefix + "params"));
        try {
            check_group(groups[i], optimizer.desc().compat != DSOPT_COMPAT_NONE);
        } catch (const Error &e) { throw Error(DSOPT_ERR_FORMAT, "group %zu of the checkpoint: %s", i, e.what()); }
        if (const MomentInfo *const moment = first_difference(moments_of(groups[i]), moments_of(optimizer.groups()[i])))
            throw Error(DSOPT_ERR_MISMATCH, "one of group %zu of the checkpoint and of this optimizer has no %s", i,
                        moment->name);
    }
    return groups;
}

/// Where the parameter that the file has at a place is in this optimizer.
std::vector<int64_t> match_params(const Optimizer &optimizer, const Fields &fields, const std::vector<int64_t> &sizes) {
    const std::vector<std::string> names = split_names(fields.text("params"));
    const std::vector<Param> &params = optimizer.params();
    std::unordered_map<std::string, int64_t> places;
    for (size_t i = 0; i < params.size(); ++i) places.emplace(params[i].name, int64_t(i));
    for (size_t i = 0; i < sizes.size(); ++i)
        if (sizes[i] < 0 || sizes[i] > int64_t(names.size()))
            throw Error(DSOPT_ERR_FORMAT, "group %zu of the checkpoint has %lld of its %zu parameters", i,
                        static_cast<long long>(sizes[i]), names.size());
    const std::vector<size_t> saved_groups = split_groups(fields, sizes, names.size());
    std::vector<int64_t> order;
    for (const std::string &name : names) {
        const size_t group = saved_groups[order.size()];
        const auto found = places.find(name);
        if (found == places.end() || found->second < 0)
            throw Error(DSOPT_ERR_MISMATCH,
                        "the checkpoint has a parameter '%.200s', this optimizer has none of that name", name.c_str());
        if (size_t(params[size_t(found->second)].group) != group)
            throw Error(DSOPT_ERR_MISMATCH,
                        "parameter '%.200s' is in group %lld of the checkpoint and in group %d here", name.c_str(),
                        static_cast<long long>(group), params[size_t(found->second)].group);
        order.push_back(found->second);
        found->second = -1; // a name counts once
    }
    for (const Param &param : params)
        if (places[param.name] >= 0)
            throw Error(DSOPT_ERR_MISMATCH, "parameter '%.200s' is not in the checkpoint", param.name.c_str());
    for (size_t i = 0; i < sizes.size(); ++i) {
        const auto here =
            std::count_if(params.begin(), params.end(), [&](const Param &param) { return size_t(param.group) == i; });
        if (sizes[i] != here)
            throw Error(DSOPT_ERR_MISMATCH, "group %zu of the checkpoint has %lld parameters, here it has %lld", i,
                        static_cast<long long>(sizes[i]), static_cast<long long>(here));
    }
    return order;
}

/// The saved rules of the machine. What makes it static or shared is a matter of this process and stays.
ScalerRules read_scaler_rules(const Fields &fields, const ScalerRules &live) {
    constexpr uint32_t kept = DSOPT_SCALER_STATIC | DSOPT_SCALER_SHARED;
    constexpr uint32_t known = kept | DSOPT_SCALER_REFILL | DSOPT_SCALER_FAIL_AT_MIN | DSOPT_SCALER_GROWTH_AT_WINDOW;
    const auto flags = fields.number<uint32_t>("scaler.flags");
    if (flags & ~known)
        throw Error(DSOPT_ERR_FORMAT, "field 'scaler.flags' of the checkpoint has unknown bits: 0x%x", flags);
    const ScalerRules rules{fields.number<double>("scaler.factor"),      fields.number<double>("scaler.min"),
                            fields.number<double>("scaler.max"),         fields.number<int32_t>("scaler.window"),
                            fields.number<int32_t>("scaler.hysteresis"), (flags & ~kept) | (live.flags & kept)};
    if ((flags ^ live.flags) & DSOPT_SCALER_STATIC)
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has a %s loss scale, this optimizer a %s one",
                    flags & DSOPT_SCALER_STATIC ? "static" : "dynamic",
                    live.flags & DSOPT_SCALER_STATIC ? "static" : "dynamic");
    try {
        Scaler::check(rules);
    } catch (const Error &e) { throw Error(DSOPT_ERR_FORMAT, "scaler of the checkpoint: %s", e.what()); }
    return rules;
}

/// The saved machine itself must be one that could have been saved.
void check_scaler_state(const SafetensorsReader &file, size_t index, const ScalerRules &rules) {
    ScalerState s;
    file.verify(index, &s);
    const auto positive = [](double value) { return std::isfinite(float(value)) && value > 0; };
    if (!positive(s.dynamic) || (s.overridden != 0 && !positive(s.forced)) || s.updates < 0 || s.last_overflow < -1 ||
        s.hysteresis < 1 || s.hysteresis > rules.hysteresis || s.skipped_in_row < 0)
        throw Error(DSOPT_ERR_FORMAT,
                    "tensor 'optimizer.scaler' of the checkpoint is no loss scale: %g after %d updates",
                    double(s.dynamic), s.updates);
}

/// Tensors with one element a parameter follow the file's order of parameters; bring them into this optimizer's.
void reorder(char *words, const std::vector<int64_t> &order) {
    const std::vector<char> saved(words, words + order.size() * 4);
    for (size_t i = 0; i < order.size(); ++i) std::memcpy(words + size_t(order[i]) * 4, saved.data() + i * 4, 4);
}

/// Memory for everything that a file brings. Only when nothing in the file can fail any more: masters are left for it
/// to fill, and a load that fails must not leave such ones behind.
void find_memory(Optimizer &optimizer, std::vector<Transfer> &transfers, bool no_masters) {
    optimizer.ensure_state(nullptr, nullptr, /*masters_follow=*/!no_masters);
    for (Transfer &transfer : transfers)
        if (transfer.entry >= 0) transfer.memory = optimizer.state()[size_t(transfer.entry)].data;
}

/// Everything is read and its checksum compared before the first byte of the optimizer changes.
void load_in_host_memory(Optimizer &optimizer, const SafetensorsReader &file, std::vector<Transfer> &transfers,
                         const std::vector<int64_t> &order, bool no_masters) {
    size_t total = 0;
    for (const Transfer &transfer : transfers) total += transfer.bytes;
    const auto staging = std::make_unique_for_overwrite<char[]>(std::max<size_t>(total, 1));
    size_t at = 0;
    for (const Transfer &transfer : transfers) {
        if (transfer.from_file())
            file.verify(transfer.index, staging.get() + at);
        else
            std::memcpy(staging.get() + at, transfer.made.data(), transfer.bytes);
        if (transfer.per_param) reorder(staging.get() + at, order);
        at += transfer.bytes;
    }
    find_memory(optimizer, transfers, no_masters);
    at = 0;
    for (const Transfer &transfer : transfers) {
        if (transfer.bytes != 0) std::memcpy(transfer.memory, staging.get() + at, transfer.bytes);
        at += transfer.bytes;
    }
}

/// Device memory may be larger than the host's: one pass compares every checksum, a second one copies through two
/// buffers. Only a source that fails or changes between the two can leave the state half loaded, and that is said.
void load_through_pieces(Optimizer &optimizer, const SafetensorsReader &file, std::vector<Transfer> &transfers,
                         const std::vector<int64_t> &order, bool no_masters) {
    const Backend &backend = optimizer.context().backend();
    std::vector<char> words(order.size() * 4);
    for (const Transfer &transfer : transfers)
        if (transfer.from_file()) file.verify(transfer.index);
    find_memory(optimizer, transfers, no_masters);
    backend.synchronize(nullptr);
    const std::unique_ptr<HostWriter> writer = backend.writer();
    try {
        for (const Transfer &transfer : transfers) {
            if (!transfer.from_file()) {
                backend.copy_from_host(transfer.memory, transfer.made.data(), transfer.bytes, nullptr);
                continue;
            }
            if (transfer.per_param) {
                file.verify(transfer.index, words.data());
                reorder(words.data(), order);
                backend.copy_from_host(transfer.memory, words.data(), transfer.bytes, nullptr);
                continue;
            }
            for (size_t at = 0; at < transfer.bytes; at += kPiece) {
                const size_t bytes = std::min(kPiece, transfer.bytes - at);
                file.read(transfer.index, at, writer->room(), bytes);
                writer->write(static_cast<char *>(transfer.memory) + at, bytes);
            }
        }
        writer->finish();
    } catch (const Error &e) { throw Error(e.status(), "%s; the state is half loaded: load it again", e.what()); }
}

} // namespace

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // numbers as text are rounded too
    if (io.files != 0) throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_io.files has an effect in loading only");
    check_io(path, io, io.write != nullptr, DSOPT_IO_PARAMS);
    if (optimizer.groups().empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    const bool with_params = io.flags & DSOPT_IO_PARAMS;
    if (with_params)
        for (const Param &param : optimizer.params())
            if (param.data == nullptr && param.numel != 0)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory", param.name.c_str());
    optimizer.ensure_state(nullptr, nullptr);
    optimizer.settle_momentum();

    Metadata metadata{{"format", "dsopt"},
                      {"format_version", kFormatVersion},
                      {"rank", to_text(optimizer.rank())},
                      {"ranks", to_text(optimizer.ranks())},
                      {"calls", to_text(optimizer.calls())},
                      {"max_norm", to_text(optimizer.desc().max_norm)},
                      {"max_value", to_text(optimizer.desc().max_value)},
                      {"groups", to_text(optimizer.groups().size())}};
    if (optimizer.node_ranks() > 1) metadata.emplace_back("node_ranks", to_text(optimizer.node_ranks()));
    for (size_t i = 0; i < optimizer.groups().size(); ++i) {
        const dsopt_group &group = optimizer.groups()[i];
        const std::string prefix = "group." + std::to_string(i) + ".";
        const auto in_group = [&](const Param &param) { return size_t(param.group) == i; };
        const RuleInfo &info = info_of(group.algorithm);
        metadata.emplace_back(prefix + "algorithm", info.name);
        for (const GroupField &field : kGroupFields)
            if (is_saved(field, info)) metadata.emplace_back(prefix + field.name, to_text(group.*field.value));
        if (is_onebit(group.algorithm)) {
            for (const NamedField &field : kTrustFields)
                metadata.emplace_back(prefix + field.name, to_text(group.*field.value));
            for (const Count &count : kCounts) metadata.emplace_back(prefix + count.name, to_text(group.*count.value));
        }
        metadata.emplace_back(prefix + "flags", to_text(group.flags));
        metadata.emplace_back(prefix + "params",
                              to_text(std::count_if(optimizer.params().begin(), optimizer.params().end(), in_group)));
    }
    metadata.emplace_back("params", join_names(optimizer.params()));
    if (std::string places = join_groups(optimizer.params()); !places.empty())
        metadata.emplace_back("param_groups", std::move(places));
    if (optimizer.desc().flags & DSOPT_OPTIMIZER_ACCUMULATE)
        metadata.emplace_back("accumulated", optimizer.accumulated());
    if (const Scaler *scaler = optimizer.scaler()) {
        const ScalerRules &rules = scaler->rules();
        metadata.emplace_back("scaler.factor", to_text(rules.factor));
        metadata.emplace_back("scaler.min", to_text(rules.min));
        metadata.emplace_back("scaler.max", to_text(rules.max));
        metadata.emplace_back("scaler.window", to_text(rules.window));
        metadata.emplace_back("scaler.hysteresis", to_text(rules.hysteresis));
        metadata.emplace_back("scaler.flags", to_text(rules.flags));
    }

    std::vector<TensorEntry> tensors;
    std::vector<const char *> memory;
    const auto add = [&](std::string name, const void *data, int32_t dtype, int64_t numel, std::vector<int64_t> dims) {
        tensors.push_back({std::move(name), dtype, std::move(dims), uint64_t(numel) * dtype_size(dtype)});
        memory.push_back(static_cast<const char *>(data));
    };
    for (const StateEntry &entry : optimizer.state())
        if (entry.saved())
            add(tensor_name(optimizer, entry), entry.data, entry.dtype, entry.numel,
                entry.param < 0 ? std::vector<int64_t>{entry.numel} : optimizer.params()[size_t(entry.param)].dims);
    if (with_params)
        for (const Param &param : optimizer.params())
            add(param_tensor_name(param), param.data, param.dtype, param.numel, param.dims);

    const Backend &backend = optimizer.context().backend();
    backend.synchronize(nullptr);
    const std::unique_ptr<HostReader> reader = backend.reader();
    const std::unique_ptr<Sink> sink = path != nullptr ? file_sink(path) : callback_sink(io);
    write_safetensors(*sink, metadata, tensors, [&](size_t index, uint64_t offset, size_t bytes, void *) {
        return reader->view(memory[index] + offset, bytes, size_t(tensors[index].bytes - offset) - bytes);
    });
}

void load_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // numbers as text are rounded too
    constexpr uint32_t known = DSOPT_IO_NO_STATE | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_HYPER | DSOPT_IO_NO_SCALER |
                               DSOPT_IO_PARAMS | DSOPT_IO_RESET_ERRORS;
    check_io(path, io, io.read != nullptr, known);
    if (optimizer.groups().empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    const bool no_state = io.flags & DSOPT_IO_NO_STATE, no_masters = io.flags & DSOPT_IO_NO_MASTERS;
    const bool with_params = io.flags & DSOPT_IO_PARAMS, no_hyper = io.flags & DSOPT_IO_NO_HYPER;
    Scaler *const scaler = io.flags & DSOPT_IO_NO_SCALER ? nullptr : optimizer.scaler();
    if (scaler != nullptr) optimizer.check_scaler();

    const RankFiles files(optimizer, path, io);
    const SafetensorsReader &file = files.file();
    const Fields fields(file);
    if (fields.text("format_version") != kFormatVersion)
        throw Error(DSOPT_ERR_FORMAT, "the checkpoint has format version %.20s, this library reads %s",
                    fields.text("format_version").c_str(), kFormatVersion);
    std::vector<int64_t> sizes;
    std::vector<dsopt_group> groups = read_groups(optimizer, fields, sizes);
    const auto max_norm = fields.number<double>("max_norm");
    const auto calls = fields.number<int64_t>("calls");
    if (!std::isfinite(max_norm) || max_norm < 0)
        throw Error(DSOPT_ERR_FORMAT, "max_norm of the checkpoint is %g", max_norm);
    const auto max_value = fields.number<double>("max_value");
    if (!is_max_value(max_value)) throw Error(DSOPT_ERR_FORMAT, "max_value of the checkpoint is %g", max_value);
    if (calls < 0) throw Error(DSOPT_ERR_FORMAT, "calls of the checkpoint is %lld", static_cast<long long>(calls));
    const std::vector<int64_t> order = match_params(optimizer, fields, sizes);
    if (optimizer.onebit() != nullptr && !std::is_sorted(order.begin(), order.end()))
        throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has the parameters in another order, and what the 1-bit family "
                                        "keeps of the whole list follows it");

    // The original forgets errors when it loads, forget_like_original() below; so their sizes do not matter.
    const bool forgets = optimizer.onebit() != nullptr && optimizer.onebit()->rules.compat;
    const bool owes =
        optimizer.onebit() != nullptr && optimizer.onebit()->compresses && !optimizer.onebit()->layout.is_exact();
    const bool with_errors = owes && !forgets && !no_state && !(io.flags & DSOPT_IO_RESET_ERRORS);
    files.check(optimizer, with_errors);

    std::vector<Transfer> transfers;
    for (size_t i = 0; i < optimizer.state().size(); ++i) {
        const StateEntry &entry = optimizer.state()[i];
        const bool master = entry.flags & DSOPT_STATE_FROM_PARAM;
        const bool of_scaler = entry.of_scaler();
        if (!entry.saved() || (entry.is_error() && !with_errors)) continue;
        if (forgets && entry.kind == StateKind::exp_avg_pad) continue;
        if (of_scaler ? scaler == nullptr : master ? no_masters : no_state) continue;
        if (files.makes(entry)) {
            if (entry.numel != 0)
                transfers.push_back({0, int64_t(i), nullptr, entry.bytes(), false, files.make(optimizer, entry)});
            continue;
        }
        const auto dims = entry.param < 0 ? std::vector<int64_t>{} : optimizer.params()[size_t(entry.param)].dims;
        transfers.push_back({find_tensor(file, tensor_name(optimizer, entry), entry.dtype, entry.numel, dims),
                             int64_t(i), nullptr, entry.bytes(), entry.per_param()});
    }
    for (const Param &param : optimizer.params()) {
        if (with_params) {
            const size_t index = find_tensor(file, param_tensor_name(param), param.dtype, param.numel, param.dims);
            if (param.data == nullptr && param.numel != 0)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to load into", param.name.c_str());
            transfers.push_back({index, -1, param.data, size_t(param.numel) * dtype_size(param.dtype), false});
        } else if (no_masters && param.has_master && param.data == nullptr && param.numel != 0) {
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from", param.name.c_str());
        }
    }

    // After the tensors: a checkpoint without a loss scale does not fit, but nothing is wrong with it.
    const ScalerRules rules = scaler != nullptr ? read_scaler_rules(fields, scaler->rules()) : ScalerRules{};
    if (optimizer.desc().compat != DSOPT_COMPAT_NONE && rules.hysteresis > 1 && !no_hyper)
        throw Error(DSOPT_ERR_MISMATCH,
                    "the checkpoint's loss scale has a hysteresis of %d, which the original's wrappers ignore",
                    rules.hysteresis);
    for (const Transfer &transfer : transfers) {
        const StateEntry *entry = transfer.entry >= 0 ? &optimizer.state()[size_t(transfer.entry)] : nullptr;
        // A rank of 0/1 Adam counts the gradients that it had in steps by itself; nothing depends on that.
        const bool own_count = entry != nullptr && entry->kind == StateKind::step && optimizer.onebit() != nullptr &&
                               optimizer.onebit()->rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM;
        if (transfer.from_file() && !own_count) files.check_alike(transfer.index);
        if (entry != nullptr && entry->kind == StateKind::scaler) check_scaler_state(file, transfer.index, rules);
    }
    std::string accumulated;
    if ((optimizer.desc().flags & DSOPT_OPTIMIZER_ACCUMULATE) && !no_state) {
        const std::string &digits = fields.text("accumulated");
        if (digits.size() != order.size())
            throw Error(DSOPT_ERR_FORMAT, "field 'accumulated' of the checkpoint has a wrong length");
        accumulated.resize(digits.size());
        for (size_t i = 0; i < order.size(); ++i) accumulated[size_t(order[i])] = digits[i];
    }

    std::vector<bool> wanted(file.tensors().size());
    for (const Transfer &transfer : transfers)
        if (transfer.from_file()) wanted[transfer.index] = true;
    for (size_t i = 0; i < wanted.size(); ++i)
        if (!wanted[i]) file.verify(i);
    files.verify_others();
    // Made before anything changes: what follows the tensors must not fail.
    std::vector<dsopt_group> new_groups = no_hyper ? optimizer.groups() : std::move(groups);
    if (optimizer.context().backend().is_host())
        load_in_host_memory(optimizer, file, transfers, order, no_masters);
    else
        load_through_pieces(optimizer, file, transfers, order, no_masters);
    if (no_masters) optimizer.reset(DSOPT_RESET_MASTERS, nullptr);
    if (scaler != nullptr && !no_hyper) scaler->restore(rules);
    if (!no_state) optimizer.set_accumulated(accumulated);
    optimizer.restore(std::move(new_groups), no_hyper ? optimizer.desc().max_norm : max_norm,
                      no_hyper ? optimizer.desc().max_value : max_value, no_state ? optimizer.calls() : calls);
    if (!no_state) optimizer.forget_like_original();
    if (io.flags & DSOPT_IO_RESET_ERRORS) optimizer.reset(DSOPT_RESET_ERRORS, nullptr);
    optimizer.note_loaded(files.resharded() ? files.saved_ranks() : 0);
    if (files.resharded() && optimizer.onebit() != nullptr)
        optimizer.context().log(DSOPT_LOG_INFO, "re-sharded a checkpoint of %d ranks for rank %d of %d: %s",
                                files.saved_ranks(), optimizer.rank(), optimizer.ranks(),
                                !with_errors ? "error feedback is dropped"
                                : files.saved_nodes() == 1
                                    ? "nothing was owed, error feedback begins with zeros"
                                    : "the mean of the worker errors and this rank's part of the "
                                      "joined server errors");
}

} // namespace dsopt
