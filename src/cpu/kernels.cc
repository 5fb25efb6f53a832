// SPDX-License-Identifier: Apache-2.0
// Compiled with -DDSOPT_ISA=<name> and that instruction set's flags. Everything but the table is local to this file,
// and no function of the standard library is used: the linker keeps one copy of a shared inline function, and it could
// be this one.
#include "cpu/tiles.h"
#include "rules/all.h"

namespace dsopt::cpu {
namespace {

int64_t count_nonfinite(const float *x, int64_t n) {
    int32_t bad = 0, nans = 0;
    for (int64_t i = 0; i < n; ++i) {
        bad += (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
        nans += (bits_of(x[i]) & 0x7fffffffu) > 0x7f800000u;
    }
    return bad + (int64_t(nans) << 32);
}

/// Magnitudes compare as integers, and a NaN is above them all.
float largest_magnitude(const float *x, int64_t n, float so_far) {
    uint32_t most = bits_of(so_far);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

void squares(const void *data, Dtype type, int64_t begin, int64_t end, double *squares, int64_t index) {
    visit(type, [&](auto tag) {
        const auto *x = element<typename decltype(tag)::storage>(data, 0);
        for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
            // One stream a thread is too little for the hardware's prefetchers, so the next leaf is asked for here.
            const bool more = leaf + 2 * kLeaf <= end;
            LeafSum sum;
            for (int64_t i = leaf, stop = least(leaf + kLeaf, end); i < stop; i += kTile) {
                if (more)
                    for (int64_t k = 0; k < kTile; k += int64_t(64 / sizeof *x)) __builtin_prefetch(x + i + kLeaf + k);
                sum.add(x + i, least(kTile, stop - i), tag);
            }
            squares[index] = sum.fold();
        }
    });
}

void inspect(const void *data, Dtype type, int64_t begin, int64_t end, double *sums, int64_t *bad, float *largest,
             int64_t index) {
    squares(data, type, begin, end, sums, index);
    Buffer buffer;
    for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
        bad[index] = 0;
        // Squares of floats and 4,096 of them cannot overflow a double, so a finite sum means finite elements. Only a
        // leaf with a non-finite one is read again to count them.
        const bool suspect = !__builtin_isfinite(sums[index]);
        if (!suspect && largest == nullptr) continue;
        const int64_t stop = least(leaf + kLeaf, end);
        float most = 0;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *x = view(data, type, i, n, buffer);
            if (suspect) bad[index] += count_nonfinite(x, n);
            if (largest != nullptr) most = largest_magnitude(x, n, most);
        }
        if (largest != nullptr) largest[index] = most;
    }
}

// ------------------------------------------------------------------------------------------------------------- rules
template <class R>
void apply(const R rule, const float *__restrict g, float *__restrict p, float *__restrict m, float *__restrict v,
           int64_t n) {
    static_assert(R::moments.count >= 0 && R::moments.count <= kMoments);
    if constexpr (R::moments.count == 0)
        for (int64_t i = 0; i < n; ++i) rule(g[i], p[i]);
    else if constexpr (R::moments.count == 1)
        for (int64_t i = 0; i < n; ++i) rule(g[i], p[i], m[i]);
    else
        for (int64_t i = 0; i < n; ++i) rule(g[i], p[i], m[i], v[i]);
}

/// The tiles of the moments that a rule has.
template <int Moments> struct MomentTiles {
    Buffer buffer[Moments > 0 ? Moments : 1];
    float *at[kMoments] = {};
    void open_all(const TensorJob &job, int64_t i, int64_t n) {
        for (int k = 0; k < Moments; ++k) at[k] = open(job.moment[k].data, job.moment[k].type, i, n, buffer[k]);
    }
    void close_all(const TensorJob &job, int64_t i, int64_t n) const {
        for (int k = 0; k < Moments; ++k) close(at[k], job.moment[k].data, job.moment[k].type, i, n);
    }
};

template <class R> void update_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    const bool keep = keeps_weight(span), needs_old = span.sums || (span.flags & kDelta);
    Buffer g_buffer, p_buffer, old;
    MomentTiles<R::moments.count> moments;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum weight_sum, update_sum;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *g = open_gradient(job, i, n, g_buffer);
            float *p = open(job.weight, job.weight_type, i, n, p_buffer, keep);
            moments.open_all(job, i, n);
            if (needs_old) widen(p, old.at, n, F32{});
            if (span.sums) weight_sum.add(p, n);
            apply(rule, g, p, moments.at[0], moments.at[1], n);
            settle(span, p, i, n);
            if (needs_old) subtract(p, old.at, n);
            if (span.sums) update_sum.add(old.at, n);
            if (!keep) close(p, job.weight, job.weight_type, i, n);
            moments.close_all(job, i, n);
            publish(span, p, old.at, i, n);
        }
        if (span.sums) {
            span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
            span.sums_b[job.first_leaf + leaf / kLeaf] = update_sum.fold();
        }
    }
}

void update(Rule rule, const Span &span) {
    visit(rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::sweeps == 1) update_with(R{*span.scalars}, span); // two are below
    });
    if (span.streaming) fence_streaming();
}

template <class R>
void apply_moments(const R rule, const float *__restrict g, const float *__restrict p, float *__restrict m,
                   float *__restrict v, float *__restrict u, int64_t n) {
    for (int64_t i = 0; i < n; ++i) u[i] = rule(g[i], p[i], m[i], v[i]);
}

template <class R> void lamb_moments_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    Buffer g_buffer, p_buffer, m_buffer, v_buffer, u;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum weight_sum, update_sum;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *g = open_gradient(job, i, n, g_buffer);
            const float *p = open(job.weight, job.weight_type, i, n, p_buffer);
            float *m = open(job.moment[0].data, job.moment[0].type, i, n, m_buffer);
            float *v = open(job.moment[1].data, job.moment[1].type, i, n, v_buffer);
            apply_moments(rule, g, p, m, v, u.at, n);
            weight_sum.add(p, n);
            update_sum.add(u.at, n);
            close(m, job.moment[0].data, job.moment[0].type, i, n);
            close(v, job.moment[1].data, job.moment[1].type, i, n);
        }
        span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
        span.sums_b[job.first_leaf + leaf / kLeaf] = update_sum.fold();
    }
}

void lamb_moments(Rule rule, const Span &span) {
    visit(rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::sweeps == 2) lamb_moments_with(typename R::Moments{*span.scalars}, span);
    });
}

template <class R>
void apply_weights(const R rule, float *__restrict p, const float *__restrict m, const float *__restrict v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) rule(p[i], m[i], v[i]);
}

template <class R> void lamb_weights_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    const bool keep = keeps_weight(span);
    Buffer p_buffer, m_buffer, v_buffer, old;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        float *p = open(job.weight, job.weight_type, i, n, p_buffer, keep);
        const float *m = open(job.moment[0].data, job.moment[0].type, i, n, m_buffer);
        const float *v = open(job.moment[1].data, job.moment[1].type, i, n, v_buffer);
        if (span.flags & kDelta) widen(p, old.at, n, F32{});
        apply_weights(rule, p, m, v, n);
        settle(span, p, i, n);
        if (span.flags & kDelta) subtract(p, old.at, n);
        if (!keep) close(p, job.weight, job.weight_type, i, n);
        publish(span, p, old.at, i, n);
    }
}

void lamb_weights(Rule rule, const Span &span) {
    visit(rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::sweeps == 2) lamb_weights_with(typename R::Weights{*span.scalars, span.trust}, span);
    });
    if (span.streaming) fence_streaming();
}

void unchanged(const Span &span) {
    const TensorJob &job = *span.job;
    Buffer p_buffer;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        if (job.out != nullptr) {
            if (span.flags & kDelta)
                __builtin_memset(p_buffer.at, 0, sizeof p_buffer.at);
            else
                load(job.weight, job.weight_type, i, n, p_buffer.at);
            store(p_buffer.at, job.out, job.out_type, i, n);
        }
        if (job.zeroes) zero_gradient(job, i, n);
    }
}

void multiply_add(float a, const float *x, float b, const float *y, float *result, int64_t n) {
    if (y == nullptr)
        for (int64_t i = 0; i < n; ++i) result[i] = a * x[i];
    else
        for (int64_t i = 0; i < n; ++i) result[i] = a * x[i] + b * y[i];
}

void axpby(float a, const dsopt_tensor &x, float b, const dsopt_tensor &y, int64_t begin, int64_t end) {
    Buffer x_buffer, y_buffer, result;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        const float *from = view(x.data, Dtype(x.dtype), i, n, x_buffer);
        const float *old = b != 0 ? view(y.data, Dtype(y.dtype), i, n, y_buffer) : nullptr;
        multiply_add(a, from, b, old, result.at, n);
        store(result.at, y.data, Dtype(y.dtype), i, n);
    }
}

void clamp(const dsopt_tensor &x, float limit, int64_t begin, int64_t end) {
    Buffer buffer;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        float *tile = open(x.data, Dtype(x.dtype), i, n, buffer);
        for (int64_t k = 0; k < n; ++k) {
            const float value = tile[k] > limit ? limit : tile[k];
            tile[k] = value < -limit ? -limit : value;
        }
        close(tile, x.data, Dtype(x.dtype), i, n);
    }
}

} // namespace

#define DSOPT_PASTE(a, b) a##b
#define DSOPT_TABLE(isa) DSOPT_PASTE(kernels_, isa)
#define DSOPT_TEXT(isa) DSOPT_QUOTE(isa)
#define DSOPT_QUOTE(isa) #isa
extern const Kernels DSOPT_TABLE(DSOPT_ISA);
const Kernels DSOPT_TABLE(DSOPT_ISA) = {DSOPT_TEXT(DSOPT_ISA), inspect,   squares, update, lamb_moments,
                                        lamb_weights,          unchanged, axpby,   clamp};

} // namespace dsopt::cpu
