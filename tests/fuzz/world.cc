// SPDX-License-Identifier: Apache-2.0
#include "world.h"
#include "support/cuda_memory.h"
#include "support/numbers.h"
#include <cstdlib>
#include <filesystem>
#include <unistd.h>

namespace fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLine = 64; // alignment of allocators

} // namespace

void *Hook::allocate(void *self, size_t bytes, size_t, void *) {
    auto &hook = *static_cast<Hook *>(self);
    if (bytes > kMaxBytes || (hook.fails_in >= 0 && hook.fails_in-- == 0)) return nullptr;
    ++hook.live;
    if (hook.backend == DSOPT_BACKEND_CUDA) return hook.memory.allocate(bytes);
    return std::aligned_alloc(kLine, (bytes + kLine) / kLine * kLine);
}
void Hook::release(void *self, void *memory, size_t, void *) {
    auto &hook = *static_cast<Hook *>(self);
    if (memory == nullptr) finding("release of NULL");
    --hook.live;
    hook.memory.release(memory);
}

World::World(Choices choices) :
    choose(choices),
    backend(choose.below(8) == 7 ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU),
    memory(backend == DSOPT_BACKEND_CUDA ? test::cuda_memory(nullptr) : test::host_memory()) {}
World::~World() {
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

std::string World::path(int index) {
    if (folder_.empty()) {
        folder_ = fs::temp_directory_path() / ("dsopt-fuzz-" + std::to_string(::getpid()));
        fs::create_directories(folder_);
    }
    return index < 3 ? folder_ + "/" + std::to_string(index) : folder_ + "/no folder/file";
}

// -------------------------------------------------------------------------------------------------------------- memory
void *World::allocate(size_t bytes) {
    blocks.emplace_back(memory, bytes);
    return blocks.back().data();
}
void *World::zeros(size_t bytes) {
    void *const data = allocate(bytes);
    blocks.back().set(Bytes(bytes, 0));
    return data;
}
void *World::words(std::initializer_list<int32_t> values) {
    void *const data = allocate(values.size() * sizeof(int32_t));
    blocks.back().set(static_cast<const void *>(values.begin()));
    return data;
}
void *World::floats(size_t count) {
    std::vector<float> values(count);
    const bool wild = choose.rarely(8);
    test::Random random(choose.byte());
    for (float &value : values) value = wild ? test::float_of(uint32_t(random.next())) : float(random.uniform(0, 1));
    void *const data = allocate(count * sizeof(float));
    blocks.back().set(static_cast<const void *>(values.data()));
    return data;
}
Block World::block(size_t bytes) const {
    Block block(memory, bytes);
    block.set(Bytes(bytes, 0x3c)); // small numbers
    return block;
}

dsopt_tensor World::tensor(int64_t numel, int32_t dtype) {
    const uint8_t mode = choose.byte();
    test::Random random(mode);
    Bytes bytes(size_t(numel) * size_of(dtype), 0);
    for (int64_t i = 0; i < numel; ++i) {
        const bool wild = mode % 8 == 1 ? i % 37 == 5 : mode % 8 == 2;
        const float value = wild ? test::float_of(uint32_t(random.next())) : float(random.uniform(-4, 4));
        test::store(&bytes[size_t(i) * size_of(dtype)], dtype, value);
    }
    void *const data = allocate(bytes.size());
    blocks.back().set(bytes);
    return {data, numel, dtype, 0};
}
void World::make_invalid(dsopt_tensor &tensor) {
    switch (choose.below(4)) {
    case 0: tensor.dtype = choose.of(kIntegers); break;
    case 1: tensor.reserved = 1; break;
    case 2: tensor.numel = choose.of(kBadSizes); break;
    case 3: // misaligned
        if (size_of(tensor.dtype) == 1) break;
        if (tensor.data != nullptr) tensor.data = static_cast<char *>(tensor.data) + 1;
        return;
    }
    tensor.data = nullptr; // another size or dtype might be accepted, and the engine would read past the end
}
void World::fill_words(const dsopt_tensor &tensor) {
    if (tensor.data == nullptr || tensor.numel <= 0 || tensor.numel > kMaxNumel) return;
    Bytes bytes(bytes_of(tensor), 0);
    memory.read(bytes.data(), tensor.data, bytes.size());
    for (int i = 1 + choose.below(3); i > 0 && bytes.size() >= 4; --i) {
        const uint32_t word = choose.of(kWords);
        std::memcpy(&bytes[4 * (choose.byte() % (bytes.size() / 4))], &word, 4);
    }
    memory.write(tensor.data, bytes.data(), bytes.size());
}
std::vector<dsopt_tensor> World::list_like(const OptimizerRecord &o, bool as_params) {
    std::vector<dsopt_tensor> list;
    for (const dsopt_tensor &param : o.params) {
        const int32_t dtype = as_params ? param.dtype : choose.of(kDtypes);
        const bool absent = param.numel < 0 || param.numel > kMaxNumel || (!as_params && choose.rarely(8));
        list.push_back(absent ? dsopt_tensor{nullptr, param.numel, dtype, 0} : tensor(param.numel, dtype));
        if (choose.rarely(48)) make_invalid(list.back());
    }
    return list;
}
bool World::describe_state(const OptimizerRecord &o, dsopt_state_info &info) {
    int64_t count = 0;
    if (counted("state_count", dsopt_optimizer_state_count(o.handle.get(), &count)) != DSOPT_OK) return false;
    described = choose.rarely(32) || count == 0 ? choose.of(kBadSizes) : choose.byte() % count;
    return counted("state", dsopt_optimizer_state(o.handle.get(), described, &info)) == DSOPT_OK &&
           info.tensor.numel <= kMaxNumel;
}
std::vector<dsopt_tensor> World::state_list(const OptimizerRecord &o, bool with_values) {
    std::vector<dsopt_tensor> list;
    int64_t count = 0;
    must("state_count", dsopt_optimizer_state_count(o.handle.get(), &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must("state", dsopt_optimizer_state(o.handle.get(), i, &info));
        if (info.tensor.numel > kMaxNumel) return {};
        const size_t bytes = bytes_of(info.tensor);
        Bytes host(bytes, 0);
        if (with_values && counted("export", dsopt_optimizer_export(o.handle.get(), i, host.data(), bytes)) != DSOPT_OK)
            host.assign(bytes, 0);
        void *const data = allocate(bytes);
        blocks.back().set(host);
        list.push_back({data, info.tensor.numel, info.tensor.dtype, 0});
    }
    return list;
}

// ---------------------------------------------------------------------------------------------------------- invariants
/// Returns everything observable, or nothing if there is too much.
Bytes World::snapshot(OptimizerRecord &o) {
    if (o.is_large()) return {};
    const int64_t fails_in = std::exchange(o.hook->fails_in, -1);
    Bytes all;
    int64_t count = 0;
    must("state_count", dsopt_optimizer_state_count(o.handle.get(), &count));
    bool complete = true;
    for (int64_t i = 0; complete && i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must("state", dsopt_optimizer_state(o.handle.get(), i, &info));
        complete = info.tensor.numel <= kMaxNumel;
        if (!complete) break;
        Bytes bytes(bytes_of(info.tensor), 0);
        complete = dsopt_optimizer_export(o.handle.get(), i, bytes.data(), bytes.size()) == DSOPT_OK;
        all += bytes;
    }
    for (const dsopt_tensor &param : o.params) {
        if (param.data == nullptr || !complete) continue;
        Bytes bytes(bytes_of(param), 0);
        memory.read(bytes.data(), param.data, bytes.size());
        all += bytes;
    }
    for (int32_t group = DSOPT_ALL_GROUPS; group < int32_t(o.groups); ++group)
        for (int32_t key = DSOPT_KEY_LR; key <= DSOPT_KEY_SKIP_BUDGET; ++key) {
            double value = 0;
            if (dsopt_optimizer_get(o.handle.get(), group, key, &value) == DSOPT_OK)
                all.append(reinterpret_cast<const char *>(&value), sizeof value);
        }
    o.hook->fails_in = fails_in;
    return complete ? all : Bytes();
}

void World::watch(OptimizerRecord &o, const char *name, const std::function<dsopt_status()> &call,
                  const std::function<void()> &then) {
    const Bytes before = choose.flip() ? snapshot(o) : Bytes();
    const dsopt_status status = call();
    if (status == DSOPT_OK) return then();
    // A step rejected because of the skip budget is counted, and a failed exchange may have begun.
    if (before.empty() || status == DSOPT_ERR_SKIPS || status == DSOPT_ERR_COMM || status == DSOPT_ERR_ABORTED) return;
    if (snapshot(o) != before)
        finding("%s was refused with %s and changed the optimizer", name, dsopt_status_name(status));
}
void World::added(OptimizerRecord &o, const std::vector<dsopt_tensor> &params, bool group) {
    o.groups += group;
    o.params.insert(o.params.end(), params.begin(), params.end());
}
void World::release_all() {
    while (!contexts.empty() || !comms.empty() || !scalers.empty() || !optimizers.empty()) {
        const int which = choose.are_left() ? choose.below(4) : 0;
        if (which == 0 && !optimizers.empty())
            optimizers.pop_back();
        else if (which <= 1 && !contexts.empty())
            contexts.pop_back();
        else if (which <= 2 && !comms.empty())
            comms.pop_back();
        else if (!scalers.empty())
            scalers.pop_back();
        else if (!comms.empty())
            comms.pop_back();
        else if (!contexts.empty())
            contexts.pop_back();
        else
            optimizers.pop_back();
    }
    retained.clear();
    for (const auto &hook : hooks)
        if (hook->live != 0) finding("%ld blocks of backend memory were not released", long(hook->live));
}

} // namespace fuzz
