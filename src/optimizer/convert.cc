// SPDX-License-Identifier: Apache-2.0
#include "optimizer/convert.h"
#include "device/host_copies.h"
#include <algorithm>

namespace dsopt {
namespace {

template <class T> const T *at(const void *data, int64_t index) { return static_cast<const T *>(data) + index; }
template <class T> T *at(void *data, int64_t index) { return static_cast<T *>(data) + index; }

/// Calls body(first, n) for each block of n elements.
template <class Body> void for_blocks(int64_t n, const Body &body) {
    for (int64_t i = 0; i < n; i += kBlock) body(i, std::min(kBlock, n - i));
}
template <class Codec> void decode_blocks(const void *codes, const float *scales, int64_t n, float *to) {
    for_blocks(n, [&](int64_t i, int64_t count) {
        load_block<Codec>(at<uint8_t>(codes, i), scales[i / kBlock], count, to + i);
    });
}
template <class Codec> void encode_blocks(const float *from, int64_t n, void *codes, float *scales) {
    for_blocks(n, [&](int64_t i, int64_t count) {
        store_block<Codec>(from + i, count, at<uint8_t>(codes, i), scales + i / kBlock);
    });
}
template <class Tag> void convert(const void *from, int64_t n, float *to, Tag tag) {
    for (int64_t i = 0; i < n; ++i) to[i] = tag.load(at<typename Tag::storage>(from, 0)[i]);
}
template <class Tag> void convert(const float *from, int64_t n, void *to, Tag tag) {
    for (int64_t i = 0; i < n; ++i) at<typename Tag::storage>(to, 0)[i] = tag.store(from[i]);
}

/// Reads an array of the backend piece by piece.
class Pieces {
public:
    Pieces(const Device &device, const void *data, size_t size, int64_t numel) :
        reader_(device),
        data_(static_cast<const char *>(data)),
        size_(size),
        numel_(numel) {}
    /// Returns elements [first, first + n), the next piece.
    const void *next(int64_t first, int64_t n) {
        if (n == 0) return nullptr;
        const int64_t rest = std::min(numel_ - first - n, n);
        return reader_.view(data_ + size_t(first) * size_, size_t(n) * size_, size_t(rest) * size_);
    }

private:
    HostReader reader_;
    const char *data_;
    size_t size_;
    int64_t numel_;
};

/// Calls body(first, n) for each piece of an array.
template <class Body> void for_chunks(int64_t numel, const Body &body) {
    for (int64_t first = 0; first < numel; first += kConverted) body(first, std::min(kConverted, numel - first));
}

struct MomentArrays {
    Format format;
    void *codes;
    float *scales;
    int64_t numel;
    size_t size() const { return size_t(size_of(format)); }
    int64_t scales_of(int64_t n) const { return has_scales(format) ? blocks_of(n) : 0; }
};
MomentArrays arrays_of(const Optimizer &optimizer, const StateEntry &entry) {
    const StateTable &state = optimizer.state();
    return {*format_from(entry.dtype, entry.moment->squares), entry.data,
            state.data<float>(state.list().data(), scale_of(entry.kind), entry.param), entry.numel};
}

} // namespace

std::optional<Format> format_from(int32_t dtype, bool squares) {
    if (is_float_dtype(dtype)) return Format(dtype); // in compat mode also f16, which no group has
    for (const FormatInfo &info : kMomentFormats)
        if (dtype_of(info.of(squares)) == dtype) return info.of(squares);
    return std::nullopt;
}

void decode(Format format, const void *codes, const float *scales, int64_t n, float *to) {
    if (!has_scales(format)) return visit(plain_dtype(format), [&](auto tag) { convert(codes, n, to, tag); });
    visit_codec(format, [&]<class Codec>(Codec) { decode_blocks<Codec>(codes, scales, n, to); });
}
void encode(Format format, const float *from, int64_t n, void *codes, float *scales) {
    if (!has_scales(format)) return visit(plain_dtype(format), [&](auto tag) { convert(from, n, codes, tag); });
    visit_codec(format, [&]<class Codec>(Codec) { encode_blocks<Codec>(from, n, codes, scales); });
}

void split_masters(const float *masters, int64_t n, uint16_t *weights, uint16_t *remainders) {
    for (int64_t i = 0; i < n; ++i) {
        const SplitMaster split = split_master(masters[i]);
        weights[i] = split.weight;
        remainders[i] = split.remainder;
    }
}
void join_masters(const uint16_t *weights, const uint16_t *remainders, int64_t n, float *masters) {
    for (int64_t i = 0; i < n; ++i) masters[i] = join_master({weights[i], remainders[i]});
}

void check_master_memory(const Param &param) {
    if (param.data == nullptr && param.numel != 0)
        throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory: its master is the parameter and its remainder",
                    param.name.c_str());
}

bool is_converted(const StateEntry &entry) {
    return entry.kind == StateKind::remainder || (entry.moment != nullptr && !is_scale(entry.kind));
}

void export_f32(const Optimizer &optimizer, const StateEntry &entry, float *host) {
    const DefaultFloatEnvironment environment; // subnormal codes
    const Device &device = optimizer.context().device();
    if (entry.kind == StateKind::remainder) {
        const Param &param = optimizer.params()[size_t(entry.param)];
        check_master_memory(param);
        Pieces weights(device, at<uint16_t>(param.data, entry.begin), sizeof(uint16_t), entry.numel);
        Pieces remainders(device, entry.data, sizeof(uint16_t), entry.numel);
        return for_chunks(entry.numel, [&](int64_t first, int64_t n) {
            const void *const upper = weights.next(first, n);
            join_masters(at<uint16_t>(upper, 0), at<uint16_t>(remainders.next(first, n), 0), n, host + first);
        });
    }
    const MomentArrays moment = arrays_of(optimizer, entry);
    Pieces codes(device, moment.codes, moment.size(), moment.numel);
    std::optional<Pieces> scales; // page-locked memory is allocated only if there are any
    if (has_scales(moment.format)) scales.emplace(device, moment.scales, sizeof(float), moment.scales_of(moment.numel));
    for_chunks(moment.numel, [&](int64_t first, int64_t n) {
        const void *const scale = scales ? scales->next(first / kBlock, moment.scales_of(n)) : nullptr;
        decode(moment.format, codes.next(first, n), static_cast<const float *>(scale), n, host + first);
    });
}

void import_f32(const Optimizer &optimizer, const StateEntry &entry, const float *host) {
    const DefaultFloatEnvironment environment; // rounding, and subnormal codes
    const Device &device = optimizer.context().device();
    const auto piece = size_t(std::min(entry.numel, kConverted));
    if (entry.kind == StateKind::remainder) {
        const Param &param = optimizer.params()[size_t(entry.param)];
        check_master_memory(param);
        std::vector<uint16_t> weights(piece), remainders(piece);
        return for_chunks(entry.numel, [&](int64_t first, int64_t n) {
            split_masters(host + first, n, weights.data(), remainders.data());
            device.copy(at<uint16_t>(param.data, entry.begin + first), weights.data(), size_t(n) * sizeof(uint16_t));
            device.copy(at<uint16_t>(entry.data, first), remainders.data(), size_t(n) * sizeof(uint16_t));
        });
    }
    const MomentArrays moment = arrays_of(optimizer, entry);
    std::vector<char> codes(piece * moment.size());
    std::vector<float> scales(size_t(moment.scales_of(int64_t(piece))));
    for_chunks(moment.numel, [&](int64_t first, int64_t n) {
        encode(moment.format, host + first, n, codes.data(), scales.data());
        device.copy(at<char>(moment.codes, first * int64_t(moment.size())), codes.data(), size_t(n) * moment.size());
        const auto count = size_t(moment.scales_of(n));
        if (count != 0) device.copy(moment.scales + first / kBlock, scales.data(), count * sizeof(float));
    });
}

} // namespace dsopt
