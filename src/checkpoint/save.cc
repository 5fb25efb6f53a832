// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "checkpoint/agreement.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/metadata.h"
#include "device/host_copies.h"
#include "optimizer/convert.h"
#include <algorithm>
#include <cstdio>
#include <optional>
#include <sys/random.h>

namespace dsopt {
namespace {

constexpr char kFunction[] = "dsopt_optimizer_save", kFailed[] = "could not save",
               kNotInPlace[] = "could not put its file in place, so the files are of different saves";

/// Returns 128 random bits, 16 in each word, on the first rank. Other ranks' words are smaller than all of these.
AgreedWords random_words(const Optimizer &optimizer) {
    AgreedWords words;
    words.fill(-1);
    if (!optimizer.shards() || optimizer.data_rank().rank != 0) return words;
    uint16_t random[std::tuple_size_v<AgreedWords>];
    if (::getrandom(random, sizeof random, 0) != ssize_t(sizeof random))
        throw Error(DSOPT_ERR_IO, "cannot save: the system has no random numbers");
    std::copy(std::begin(random), std::end(random), words.begin());
    return words;
}
std::string hex(const AgreedWords &words) {
    std::string text;
    for (const int32_t word : words) {
        char digits[16];
        std::snprintf(digits, sizeof digits, "%04x", unsigned(word));
        text += digits;
    }
    return text;
}

/// Where the elements of a tensor of the file are.
struct Source {
    const char *data;
    const char *remainder; // of the masters that `data` has the weights of; NULL: `data` has the bytes of the file
};

/// The tensors of a file, and their memory.
class Contents {
public:
    std::vector<TensorEntry> tensors;
    std::vector<Source> sources;

    Contents(const Optimizer &optimizer, bool with_params) : optimizer_(optimizer) {
        for (const StateEntry &entry : optimizer.state()) {
            if (!entry.saved()) continue;
            Source source{static_cast<const char *>(entry.data), nullptr};
            if (entry.kind == StateKind::remainder)
                source = {static_cast<const char *>(optimizer.params()[size_t(entry.param)].data) +
                              entry.begin * int64_t(sizeof(uint16_t)),
                          source.data};
            if (entry.flags & DSOPT_STATE_SHARDED)
                add_part(tensor_of(optimizer, entry), entry, entry.block(), source);
            else
                add(tensor_of(optimizer, entry), source);
        }
        for (size_t i = 0; with_params && i < optimizer.params().size(); ++i) {
            const Param &param = optimizer.params()[i];
            const auto *const data = static_cast<const char *>(param.data);
            if (!optimizer.shards()) {
                add(tensor_of(param), {data, nullptr});
                continue;
            }
            const Range part = optimizer.part_of(i);
            add_part(tensor_of(param), part, 1, {data + part.begin * int64_t(dtype_size(param.dtype)), nullptr});
        }
    }

private:
    void add(TensorEntry tensor, const Source &source) {
        tensors.push_back(std::move(tensor));
        sources.push_back(source);
    }
    /// Adds this rank's part of a tensor: whole, or in pieces. `block`: elements of the parameter per element.
    void add_part(const TensorEntry &whole, const Range &part, int32_t block, const Source &source) {
        // With SHARD_NODE every node has all parts: nodes behind the first leave them out.
        const DataRank local = optimizer_.data_rank();
        const bool in_node = optimizer_.parts()->sharding() == Sharding::in_node;
        if (in_node && local.rank != local.first_of_slice()) return;
        const int64_t longest = kFilePiece / block;
        if (part.numel == part.whole && part.numel <= longest) return add(whole, source);
        const size_t size = dtype_size(whole.dtype), in_memory = source.remainder != nullptr ? size / 2 : size;
        for (int64_t first = 0; first < part.numel; first += longest) {
            const int64_t n = std::min(longest, part.numel - first);
            const size_t offset = size_t(first) * in_memory;
            add({piece_name(whole.name, part.begin + first), whole.dtype, {n}, uint64_t(n) * size},
                {source.data + offset, source.remainder != nullptr ? source.remainder + offset : nullptr});
        }
    }

    const Optimizer &optimizer_;
};

/// Returns what a load requires to be the same in all files of a save.
Alike alike_of(const Optimizer &optimizer, const dsopt_io &io) {
    Alike alike;
    if (!optimizer.shards()) return alike;
    alike.add("dsopt_io.flags", std::to_string(io.flags));
    for (const auto &[key, value] : metadata_of(optimizer, ""))
        if (!is_rank_field(key)) alike.add(key, value);
    std::vector<char> contents;
    for (const StateEntry &entry : optimizer.state()) {
        if (!entry.saved() || (entry.flags & DSOPT_STATE_RANK_LOCAL)) continue;
        const TensorEntry tensor = tensor_of(optimizer, entry);
        if (entry.param >= 0) {
            alike.add(tensor.name, dtype_name(tensor.dtype));
            continue;
        }
        contents.resize(entry.bytes());
        if (!contents.empty()) optimizer.context().device().copy(contents.data(), entry.data, contents.size());
        alike.add(tensor.name, contents.data(), contents.size());
    }
    return alike;
}

void check_save(const Optimizer &optimizer, const char *path, const dsopt_io &io) {
    if (io.files != 0) throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_io.files is for loading only");
    check_io(path, io, io.write != nullptr, DSOPT_IO_PARAMS);
    check_groups(optimizer);
    const bool with_params = io.flags & DSOPT_IO_PARAMS;
    for (const Param &param : optimizer.params())
        if ((with_params || param.has_remainder) && param.data == nullptr && param.numel != 0)
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory%s", param.name.c_str(),
                        with_params ? "" : ": its master is the parameter and its remainder");
}

} // namespace

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // conversion of numbers to text rounds, too
    AgreedWords id{};
    Agreement begin(optimizer, CallPoint::save_begins, kFunction, kFailed),
        end(optimizer, CallPoint::save_is_written, kFunction, kFailed),
        placed(optimizer, CallPoint::save_is_placed, kFunction, kNotInPlace),
        done(optimizer, CallPoint::save_is_kept, kFunction, kNotInPlace);
    AgreedWords none{};
    std::unique_ptr<Sink> sink;
    begin.run([&] {
        check_save(optimizer, path, io);
        optimizer.prepare_for_host();
        sink = path != nullptr ? file_sink(path) : callback_sink(io);
        id = random_words(optimizer);
        (void)begin.reach(id, alike_of(optimizer, io));
    });
    const auto write = [&] {
        const Contents contents(optimizer, (io.flags & DSOPT_IO_PARAMS) != 0);
        HostReader reader(optimizer.context().device());
        std::optional<HostReader> remainders; // page-locked memory is allocated only if there are any
        std::vector<float> masters;
        const auto deliver = [&](size_t index, uint64_t offset, size_t bytes) -> const void * {
            const auto &[data, remainder] = contents.sources[index];
            const auto rest = size_t(contents.tensors[index].bytes - offset) - bytes;
            if (remainder == nullptr) return reader.view(data + offset, bytes, rest);
            // Half of a master's bytes are in the weight, half in the remainder.
            const auto view = [&](HostReader &half, const char *from) {
                return static_cast<const uint16_t *>(
                    half.view(from + offset / 2, bytes / 2, std::min(rest, bytes) / 2));
            };
            if (!remainders) remainders.emplace(optimizer.context().device());
            masters.resize(bytes / sizeof(float));
            join_masters(view(reader, data), view(*remainders, remainder), int64_t(masters.size()), masters.data());
            return masters.data();
        };
        write_safetensors(*sink, metadata_of(optimizer, hex(id)), contents.tensors, deliver,
                          [&] { (void)end.reach(none); });
    };
    done.run([&] {
        placed.run([&] {
            end.run(write);
            (void)placed.reach(none);
        });
        if (optimizer.shards() && !sink->is_in_place())
            throw Error(DSOPT_ERR_MISMATCH,
                        "the file is not in place: another rank, or another program, saved to the same path");
        (void)done.reach(none); // every file is in place
    });
}

} // namespace dsopt
