// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/metadata.h"
#include "device/host_copies.h"

namespace dsopt {

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // conversion of numbers to text rounds, too
    if (io.files != 0) throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_io.files is for loading only");
    check_io(path, io, io.write != nullptr, DSOPT_IO_PARAMS);
    check_groups(optimizer);
    const bool with_params = io.flags & DSOPT_IO_PARAMS;
    if (with_params)
        for (const Param &param : optimizer.params())
            if (param.data == nullptr && param.numel != 0)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory", param.name.c_str());
    optimizer.prepare_for_host();

    const Metadata metadata = metadata_of(optimizer);
    std::vector<TensorEntry> tensors;
    std::vector<const char *> memory;
    const auto add = [&](TensorEntry tensor, const void *data) {
        tensors.push_back(std::move(tensor));
        memory.push_back(static_cast<const char *>(data));
    };
    for (const StateEntry &entry : optimizer.state())
        if (entry.saved()) add(tensor_of(optimizer, entry), entry.data);
    if (with_params)
        for (const Param &param : optimizer.params()) add(tensor_of(param), param.data);

    HostReader reader(optimizer.context().device());
    const std::unique_ptr<Sink> sink = path != nullptr ? file_sink(path) : callback_sink(io);
    write_safetensors(*sink, metadata, tensors, [&](size_t index, uint64_t offset, size_t bytes) {
        return reader.view(memory[index] + offset, bytes, size_t(tensors[index].bytes - offset) - bytes);
    });
}

} // namespace dsopt
