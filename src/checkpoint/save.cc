// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/metadata.h"
#include "device/host_copies.h"
#include "optimizer/convert.h"
#include <algorithm>
#include <optional>

namespace dsopt {

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // conversion of numbers to text rounds, too
    if (io.files != 0) throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_io.files is for loading only");
    check_io(path, io, io.write != nullptr, DSOPT_IO_PARAMS);
    check_groups(optimizer);
    const bool with_params = io.flags & DSOPT_IO_PARAMS;
    for (const Param &param : optimizer.params())
        if ((with_params || param.has_remainder) && param.data == nullptr && param.numel != 0)
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory%s", param.name.c_str(),
                        with_params ? "" : ": its master is the parameter and its remainder");
    optimizer.prepare_for_host();

    const Metadata metadata = metadata_of(optimizer);
    std::vector<TensorEntry> tensors;
    struct Memory {
        const char *data;
        const char *remainder; // of the masters that `data` has the weights of; NULL: `data` is the whole tensor
    };
    std::vector<Memory> memory;
    const auto add = [&](TensorEntry tensor, const void *data, const void *remainder = nullptr) {
        tensors.push_back(std::move(tensor));
        memory.push_back({static_cast<const char *>(data), static_cast<const char *>(remainder)});
    };
    for (const StateEntry &entry : optimizer.state()) {
        if (entry.kind == StateKind::remainder)
            add(tensor_of(optimizer, entry), optimizer.params()[size_t(entry.param)].data, entry.data);
        else if (entry.saved())
            add(tensor_of(optimizer, entry), entry.data);
    }
    if (with_params)
        for (const Param &param : optimizer.params()) add(tensor_of(param), param.data);

    HostReader reader(optimizer.context().device());
    std::optional<HostReader> remainders; // page-locked memory is allocated only if there are any
    std::vector<float> masters;
    const std::unique_ptr<Sink> sink = path != nullptr ? file_sink(path) : callback_sink(io);
    write_safetensors(*sink, metadata, tensors, [&](size_t index, uint64_t offset, size_t bytes) -> const void * {
        const auto &[data, remainder] = memory[index];
        const auto rest = size_t(tensors[index].bytes - offset) - bytes;
        if (remainder == nullptr) return reader.view(data + offset, bytes, rest);
        // Half of a master's bytes are in the weight, half in the remainder.
        const auto view = [&](HostReader &half, const char *from) {
            return static_cast<const uint16_t *>(half.view(from + offset / 2, bytes / 2, std::min(rest, bytes) / 2));
        };
        if (!remainders) remainders.emplace(optimizer.context().device());
        masters.resize(bytes / sizeof(float));
        join_masters(view(reader, data), view(*remainders, remainder), int64_t(masters.size()), masters.data());
        return masters.data();
    });
}

} // namespace dsopt
