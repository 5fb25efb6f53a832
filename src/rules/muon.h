// SPDX-License-Identifier: Apache-2.0
// Muon (Jordan et al. 2024) as in torch.optim.Muon, and with Nesterov's mixture of optax. The momentum of a matrix is
// orthogonalised by Newton-Schulz iterations. The functors are the element-wise parts of the rule.
#pragma once
#include "base/status.h"
#include "rules/formats.h"
#include "rules/scalars.h"
#include <iterator>

namespace dsopt {

template <bool Nesterov> struct Muon {
    static constexpr Passes passes = Passes::matrix;
    static constexpr uint32_t fields = kMomentum | kEps | kBiasCorrection | kMatrix;
    static constexpr MomentList moments{1, {{"momentum_buffer", "momentum_buffer_scale"}}};
    /// Moves the momentum, and computes the update before it is orthogonalised.
    struct Form {
        Scalars s;
        template <class F> DSOPT_HD void operator()(F g, F &m, F &u) const {
            g = unscale(s, g);
            m = s.beta1 * m + s.a1 * g;
            u = Nesterov ? s.a2 * g + s.beta2 * m : m;
        }
    };
};

/// Moves weights by an orthogonalised update.
struct MatrixApply {
    float decay;             // 1 - lr wd
    float lr;                // with the adjustment to the shape
    MatrixApply() = default; // sets nothing
    DSOPT_HD MatrixApply(const Hyper &hyper, double adjust) :
        decay(float(1.0 - hyper.lr * hyper.weight_decay)),
        lr(float(hyper.lr * adjust)) {}
    template <class F> DSOPT_HD void operator()(F &p, F o) const { p = p * decay - lr * o; }
};

/// Magnitudes below it become 0 when inputs of products are rounded: no partial sum of 16-bit inputs is then denormal,
/// so instructions that flush denormals give the same bits.
constexpr float kLeastInput = 0x1p-50f;
/// Limits of eps. Above 2^-100 its reciprocal is finite in fp32.
constexpr double kLeastNsEps = 0x1p-100, kLargestNsEps = 1;
/// True for hyper-parameters that a group of Muon may have, in addition to their ranges in kGroupFields.
DSOPT_HD bool matrix_hypers_are_valid(double momentum, double eps) {
    return momentum > 0 && momentum < 1 && eps >= kLeastNsEps && eps <= kLargestNsEps;
}

/// Returns the factor that normalises a matrix, from the sum of the squares of its elements.
DSOPT_HD double ns_scale(double squares, double eps) {
    const double norm = sqrt(squares);
    return 1.0 / (norm > eps ? norm : eps);
}

/// Coefficients of one Newton-Schulz iteration.
struct NsTriple {
    double a, b, c;
};
/// Triples of an iteration; a step after the last one repeats it.
struct NsTriples {
    NsTriple at[5];
    int count;
};
/// Five steps of Amsel et al. 2025, for singular values that are up to 5 % too large: degree d is divided by 1.05^d.
inline constexpr NsTriples kPolarExpress = [] {
    NsTriples triples{{{8.28721201814563, -23.595886519098837, 17.300387312530933},
                       {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                       {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                       {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                       {2.300652019954817, -1.6689039845747493, 0.4188073119525673}},
                      5};
    for (NsTriple &triple : triples.at) {
        triple.a /= 1.05;
        triple.b /= 1.05 * 1.05 * 1.05;
        triple.c /= 1.05 * 1.05 * 1.05 * 1.05 * 1.05;
    }
    return triples;
}();
inline constexpr NsTriples kYou{{{4.0848, -6.8946, 2.9270},
                                 {3.9505, -6.3029, 2.6377},
                                 {3.7418, -5.5913, 2.3037},
                                 {2.8769, -3.1427, 1.2046},
                                 {2.8366, -3.0525, 1.2012}},
                                5};
constexpr NsTriple kJordan{3.4445, -4.7750, 2.0315};

/// Returns the triples of a group.
inline NsTriples ns_triples_of(const dsopt_group &group) {
    switch (group.ns_schedule) {
    case DSOPT_NS_POLAR_EXPRESS: return kPolarExpress;
    case DSOPT_NS_YOU: return kYou;
    default: return {{{group.ns_a, group.ns_b, group.ns_c}}, 1};
    }
}
/// Sets the schedule, with the triple that goes with it.
inline void set_ns_schedule(dsopt_group &group, int32_t schedule) {
    const NsTriple triple = schedule == DSOPT_NS_CONSTANT ? kJordan : NsTriple{};
    group.ns_schedule = schedule;
    group.ns_a = triple.a;
    group.ns_b = triple.b;
    group.ns_c = triple.c;
}

/// Returns the factor of the learning rate for a matrix. `adjust`: enum dsopt_adjust.
inline double adjustment(int32_t adjust, int64_t outputs, int64_t inputs) {
    const auto r = double(outputs), c = double(inputs);
    switch (adjust) {
    case DSOPT_ADJUST_ORIGINAL: return sqrt(r > c ? r / c : 1.0);
    case DSOPT_ADJUST_MATCH_RMS_ADAMW: return 0.2 * sqrt(r > c ? r : c);
    case DSOPT_ADJUST_SPECTRAL: return sqrt(r / c);
    default: return 1.0;
    }
}

inline void muon_defaults(dsopt_group &group) {
    group.lr = 1e-3;
    group.momentum = 0.95;
    group.weight_decay = 0.1;
    group.eps = 1e-7;
    group.flags = DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION;
    group.ns_steps = 5;
    group.ns_dtype = DSOPT_DTYPE_BF16;
    set_ns_schedule(group, DSOPT_NS_CONSTANT);
}
inline void check_muon(const dsopt_group &group, bool) {
    if (!(group.momentum > 0 && group.momentum < 1))
        throw Error(DSOPT_ERR_ARGUMENT, "momentum is %g, must be in (0, 1) in muon", group.momentum);
    if (!matrix_hypers_are_valid(group.momentum, group.eps))
        throw Error(DSOPT_ERR_ARGUMENT, "eps is %g, must be in [2^-100, 1] in muon", group.eps);
    const FormatInfo &format = kMomentFormats[group.exp_avg_format];
    if (has_scales(format.gradients))
        throw Error(DSOPT_ERR_UNSUPPORTED, "exp_avg_format is %s: the momentum of muon is F32, BF16 or BF16_RANDOM",
                    format.name);
}
inline Rule muon_formula(const dsopt_group &group, bool) {
    return group.flags & DSOPT_GROUP_NESTEROV ? Rule::muon_nesterov : Rule::muon;
}
inline constexpr RuleInfo kMuon{.algorithm = DSOPT_ALGORITHM_MUON,
                                .name = "muon",
                                .fields = kMomentum | kEps | kBiasCorrection | kMatrix,
                                .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_NESTEROV,
                                .defaults = muon_defaults,
                                .check = check_muon,
                                .formula = muon_formula};

/// True for groups whose parameters are matrices.
constexpr bool is_matrix_rule(int32_t algorithm) { return algorithm == DSOPT_ALGORITHM_MUON; }

} // namespace dsopt
