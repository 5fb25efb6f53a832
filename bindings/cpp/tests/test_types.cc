// SPDX-License-Identifier: Apache-2.0
// Spans, tensors, errors and groups.
#include "support.h"
#include <array>
#include <cstring>
#if __cplusplus >= 202002L
#include <span>
#endif

namespace types_tests {

struct Half {
    std::uint16_t bits;
};

} // namespace types_tests

template <> struct dsopt::dtype_of<types_tests::Half> { static constexpr dsopt::dtype value = dsopt::dtype::f16; };

namespace types_tests {

std::size_t length(dsopt::span<const float> list) { return list.size(); }

TEST(CppSpan, ConvertsFromContiguousContainers) {
    std::vector<float> vector(3);
    const std::vector<float> constant(4);
    std::array<float, 5> array{};
    float plain[6] = {};
    EXPECT_EQ(length(vector), 3u);
    EXPECT_EQ(length(constant), 4u);
    EXPECT_EQ(length(array), 5u);
    EXPECT_EQ(length(plain), 6u);
    EXPECT_EQ(length({plain, 2}), 2u);
    EXPECT_EQ(length({1.f, 2.f, 3.f}), 3u);
    EXPECT_EQ(length(std::vector<float>(7)), 7u);
    EXPECT_EQ(length({}), 0u);
    EXPECT_EQ(length(dsopt::span<float>(vector)), 3u);
#if __cplusplus >= 202002L
    EXPECT_EQ(length(std::span<float>(vector)), 3u);
    EXPECT_EQ(length(std::span<const float, 2>(plain, 2)), 2u);
#endif
    const dsopt::span<float> writable = vector;
    writable[2] = 5;
    EXPECT_EQ(vector[2], 5);
    EXPECT_EQ(writable.data(), vector.data());
    EXPECT_EQ(writable.end() - writable.begin(), 3);
    EXPECT_FALSE(writable.empty());
    EXPECT_TRUE(dsopt::span<float>().empty());
}

TEST(CppSpan, DoesNotConvertFromUnsuitableTypes) {
    using writable = dsopt::span<float>;
    EXPECT_FALSE((std::is_constructible_v<writable, const std::vector<float> &>)); // would drop const
    EXPECT_FALSE((std::is_constructible_v<writable, std::vector<float>>));         // would dangle
    EXPECT_FALSE((std::is_constructible_v<writable, std::vector<double> &>));
    EXPECT_FALSE((std::is_constructible_v<writable, int>));
    EXPECT_TRUE((std::is_constructible_v<writable, std::vector<float> &>));
    // Indexing a span of a base class over objects of a derived class would use the wrong element size.
    struct Derived : dsopt_tensor {};
    EXPECT_FALSE((std::is_constructible_v<dsopt::span<const dsopt_tensor>, std::vector<Derived> &>));
}

TEST(CppTensor, ViewHasTheDtypeOfTheElements) {
    std::vector<float> f32(3);
    std::vector<dsopt::f16> f16(4);
    std::vector<dsopt::bf16> bf16(5);
    std::int32_t i32[6];
    std::int16_t i16[7];
    std::uint8_t u8[8];
    dsopt::f8_e4m3 f8[9];
    Half own[2];
    EXPECT_EQ(dsopt::view(f32).data, f32.data());
    EXPECT_EQ(dsopt::view(f32).numel, 3);
    EXPECT_EQ(dsopt::view(f32).dtype, DSOPT_DTYPE_F32);
    EXPECT_EQ(dsopt::view(f32.data() + 1, 2).numel, 2);
    EXPECT_EQ(dsopt::view(f16).dtype, DSOPT_DTYPE_F16);
    EXPECT_EQ(dsopt::view(bf16).dtype, DSOPT_DTYPE_BF16);
    EXPECT_EQ(dsopt::view(bf16).numel, 5);
    EXPECT_EQ(dsopt::view(i32).dtype, DSOPT_DTYPE_I32);
    EXPECT_EQ(dsopt::view(i16).dtype, DSOPT_DTYPE_I16);
    EXPECT_EQ(dsopt::view(u8).dtype, DSOPT_DTYPE_U8);
    EXPECT_EQ(dsopt::view(f8).dtype, DSOPT_DTYPE_F8_E4M3);
    EXPECT_EQ(dsopt::view(f8).numel, 9);
    EXPECT_EQ(dsopt::view(own).dtype, DSOPT_DTYPE_F16);
    EXPECT_EQ(dsopt::view(dsopt::span<float>(f32)).numel, 3);
    EXPECT_EQ(dsopt::view(nullptr, 7, dsopt::dtype::bf16).numel, 7);
    const std::vector<float> constant(8);
    EXPECT_EQ(dsopt::read_only(constant).data, constant.data());
    EXPECT_EQ(dsopt::read_only(constant).numel, 8);
    EXPECT_EQ(dsopt::read_only(constant.data(), 2).numel, 2);
    EXPECT_EQ(dsopt::view(f32).reserved, 0);
}

template <class C> using view_of = decltype(dsopt::view(std::declval<C>()));
template <class C> using read_only_of = decltype(dsopt::read_only(std::declval<C>()));

TEST(CppTensor, ViewRejectsTemporaries) {
    using array = std::array<float, 3>;
    EXPECT_TRUE((dsopt::detail::has<view_of, std::vector<float> &>));
    EXPECT_TRUE((dsopt::detail::has<view_of, array &>));
    EXPECT_TRUE((dsopt::detail::has<view_of, dsopt::span<float>>));
    EXPECT_FALSE((dsopt::detail::has<view_of, std::vector<float>>));
    EXPECT_FALSE((dsopt::detail::has<view_of, array>));
    EXPECT_TRUE((dsopt::detail::has<read_only_of, std::vector<float> &>));
    EXPECT_TRUE((dsopt::detail::has<read_only_of, const array &>));
    EXPECT_TRUE((dsopt::detail::has<read_only_of, dsopt::span<const float>>));
    EXPECT_FALSE((dsopt::detail::has<read_only_of, std::vector<float>>));
    EXPECT_FALSE((dsopt::detail::has<read_only_of, array>));
}

TEST(CppError, FailThrowsTheClassOfTheStatus) {
    const auto thrown = [](dsopt_status status) -> const std::type_info & {
        try {
            dsopt::detail::fail(status, "text");
        } catch (const dsopt::error &failure) {
            EXPECT_EQ(failure.status(), status);
            EXPECT_STREQ(failure.text(), "text");
            EXPECT_STREQ(failure.name(), dsopt_status_name(status));
            EXPECT_EQ(failure.what(), std::string(failure.name()) + ": text");
            return typeid(failure);
        }
    };
    for (const dsopt_status status : {DSOPT_ERR_ARGUMENT, DSOPT_ERR_SHAPE, DSOPT_ERR_DTYPE, DSOPT_ERR_ALIGNMENT,
                                      DSOPT_ERR_OVERLAP, DSOPT_ERR_DEVICE, DSOPT_ERR_WORKSPACE, DSOPT_ERR_VERSION}) {
        EXPECT_EQ(thrown(status), typeid(dsopt::argument_error)) << status;
    }
    EXPECT_EQ(thrown(DSOPT_ERR_UNSUPPORTED), typeid(dsopt::unsupported_error));
    for (const dsopt_status status :
         {DSOPT_ERR_STATE, DSOPT_ERR_BUSY, DSOPT_ERR_FORKED, DSOPT_ERR_SKIPS, DSOPT_ERR_HOOK}) {
        EXPECT_EQ(thrown(status), typeid(dsopt::state_error)) << status;
    }
    EXPECT_EQ(thrown(DSOPT_ERR_NOMEM), typeid(dsopt::memory_error));
    EXPECT_EQ(thrown(DSOPT_ERR_MISSING), typeid(dsopt::missing_error));
    EXPECT_EQ(thrown(DSOPT_ERR_IO), typeid(dsopt::io_error));
    EXPECT_EQ(thrown(DSOPT_ERR_INTERNAL), typeid(dsopt::error));
    EXPECT_EQ(thrown(DSOPT_ERR_BACKEND), typeid(dsopt::backend_error));
    EXPECT_EQ(thrown(DSOPT_ERR_COMM), typeid(dsopt::comm_error));
    EXPECT_EQ(thrown(DSOPT_ERR_TIMEOUT), typeid(dsopt::timeout));
    EXPECT_EQ(thrown(DSOPT_ERR_ABORTED), typeid(dsopt::aborted));
    EXPECT_EQ(thrown(1234), typeid(dsopt::error));
    for (const dsopt_status status : {DSOPT_ERR_FORMAT, DSOPT_ERR_CHECKSUM, DSOPT_ERR_MISMATCH}) {
        EXPECT_EQ(thrown(status), typeid(dsopt::checkpoint_error)) << status;
    }
    EXPECT_TRUE((std::is_base_of_v<dsopt::comm_error, dsopt::timeout>));
    EXPECT_TRUE((std::is_base_of_v<std::runtime_error, dsopt::error>));
}

void expect_defaults(const dsopt_group &group, std::int32_t algorithm) {
    dsopt_group filled;
    MUST(dsopt_group_init(&filled, sizeof filled, algorithm));
    EXPECT_EQ(group.algorithm, algorithm);
    EXPECT_EQ(std::memcmp(&group, &filled, sizeof group), 0) << algorithm;
}

TEST(CppGroup, HasTheLibraryDefaults) {
    expect_defaults(dsopt::adam{}, DSOPT_ALGORITHM_ADAM);
    expect_defaults(dsopt::adamw{}, DSOPT_ALGORITHM_ADAMW);
    expect_defaults(dsopt::adam_legacy{}, DSOPT_ALGORITHM_ADAM_LEGACY);
    expect_defaults(dsopt::lamb{}, DSOPT_ALGORITHM_LAMB);
    expect_defaults(dsopt::sgd{}, DSOPT_ALGORITHM_SGD);
    expect_defaults(dsopt::adagrad{}, DSOPT_ALGORITHM_ADAGRAD);
    expect_defaults(dsopt::lion{}, DSOPT_ALGORITHM_LION);
    expect_defaults(dsopt::muon{}, DSOPT_ALGORITHM_MUON);
    expect_defaults(dsopt::onebit_adam{}, DSOPT_ALGORITHM_ONEBIT_ADAM);
    expect_defaults(dsopt::zero_one_adam{}, DSOPT_ALGORITHM_ZERO_ONE_ADAM);
    expect_defaults(dsopt::onebit_lamb{}, DSOPT_ALGORITHM_ONEBIT_LAMB);
}

/// Sets the fields that every algorithm has, and compares the resulting dsopt_group.
template <class Group> dsopt_group common(Group group) {
    group.lr = 1, group.weight_decay = 5, group.max_norm = 6;
    const dsopt_group made = group;
    EXPECT_EQ(made.size, sizeof made);
    EXPECT_EQ(made.lr, 1);
    EXPECT_EQ(made.weight_decay, 5);
    EXPECT_EQ(made.max_norm, 6);
    return made;
}
/// Same for the fields of algorithms with two moments.
template <class Group> dsopt_group adaptive(Group group) {
    group.beta1 = 0.2, group.beta2 = 0.3, group.eps = 4;
    const dsopt_group made = common(group);
    EXPECT_EQ(made.beta1, 0.2);
    EXPECT_EQ(made.beta2, 0.3);
    EXPECT_EQ(made.eps, 4);
    return made;
}

TEST(CppGroup, PassesEveryFieldToTheLibrary) {
    dsopt::adam adam;
    adam.bias_correction = false;
    EXPECT_EQ(adaptive(adam).flags, DSOPT_GROUP_NO_BIAS_CORRECTION);
    dsopt::adamw adamw;
    adamw.bias_correction = false;
    EXPECT_EQ(adaptive(adamw).flags, DSOPT_GROUP_NO_BIAS_CORRECTION);
    adam = {}, adam.eps_uncorrected = true;
    EXPECT_EQ(adaptive(adam).flags, DSOPT_GROUP_EPS_UNCORRECTED);
    adamw = {}, adamw.eps_uncorrected = true;
    EXPECT_EQ(adaptive(adamw).flags, DSOPT_GROUP_EPS_UNCORRECTED);
    dsopt::adam_legacy legacy;
    legacy.eps_inside_sqrt = true;
    EXPECT_EQ(adaptive(legacy).flags, DSOPT_GROUP_EPS_INSIDE_SQRT);
    dsopt::lamb lamb;
    lamb.bias_correction = false, lamb.eps_inside_sqrt = true, lamb.min_trust = 7, lamb.max_trust = 8;
    EXPECT_EQ(adaptive(lamb).flags, DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_EPS_INSIDE_SQRT);
    EXPECT_EQ(adaptive(lamb).min_trust, 7);
    EXPECT_EQ(adaptive(lamb).max_trust, 8);
    dsopt::sgd sgd;
    sgd.momentum = 0.5, sgd.dampening = 0.25, sgd.nesterov = true;
    const dsopt_group descent = common(sgd);
    EXPECT_EQ(descent.momentum, 0.5);
    EXPECT_EQ(descent.dampening, 0.25);
    EXPECT_EQ(descent.flags, DSOPT_GROUP_NESTEROV);
    dsopt::adagrad adagrad;
    adagrad.eps = 4, adagrad.lr_decay = 0.5, adagrad.initial_accumulator_value = 21, adagrad.eps_inside_sqrt = true;
    const dsopt_group sums = common(adagrad);
    EXPECT_EQ(sums.eps, 4);
    EXPECT_EQ(sums.lr_decay, 0.5);
    EXPECT_EQ(sums.initial_accumulator_value, 21);
    EXPECT_EQ(sums.flags, DSOPT_GROUP_EPS_INSIDE_SQRT);
    dsopt::lion lion;
    lion.beta1 = 0.2, lion.beta2 = 0.3;
    EXPECT_EQ(common(lion).beta1, 0.2);
    EXPECT_EQ(common(lion).beta2, 0.3);
    dsopt::muon muon;
    EXPECT_EQ(common(muon).flags, DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION);
    muon.momentum = 0.2, muon.eps = 4, muon.nesterov = false, muon.bias_correction = true, muon.ns_steps = 7;
    muon.ns_coefficients = {2, -1.5, 0.5}, muon.ns_dtype = dsopt::dtype::f16;
    muon.adjust = dsopt::adjust::spectral_unclamped;
    const dsopt_group matrices = common(muon);
    EXPECT_EQ(matrices.momentum, 0.2);
    EXPECT_EQ(matrices.eps, 4);
    EXPECT_EQ(matrices.flags, 0);
    EXPECT_EQ(matrices.ns_steps, 7);
    EXPECT_EQ(matrices.ns_a, 2);
    EXPECT_EQ(matrices.ns_b, -1.5);
    EXPECT_EQ(matrices.ns_c, 0.5);
    EXPECT_EQ(matrices.ns_dtype, DSOPT_DTYPE_F16);
    EXPECT_EQ(matrices.adjust, DSOPT_ADJUST_SPECTRAL);
    muon = {}, muon.ns_schedule = dsopt::ns_schedule::you;
    EXPECT_EQ(common(muon).ns_schedule, DSOPT_NS_YOU);
    EXPECT_EQ(common(muon).ns_a, 0);
    dsopt::onebit_adam onebit;
    onebit.freeze_step = 9, onebit.non_freeze = true;
    EXPECT_EQ(adaptive(onebit).freeze_step, 9);
    EXPECT_EQ(adaptive(onebit).flags, DSOPT_GROUP_NON_FREEZE);
    dsopt::zero_one_adam zero_one;
    zero_one.freeze_step = 10, zero_one.var_interval_steps = 11, zero_one.local_interval_steps = 12;
    zero_one.max_local_interval = 13;
    EXPECT_EQ(adaptive(zero_one).freeze_step, 10);
    EXPECT_EQ(adaptive(zero_one).var_interval_steps, 11);
    EXPECT_EQ(adaptive(zero_one).local_interval_steps, 12);
    EXPECT_EQ(adaptive(zero_one).max_local_interval, 13);
    dsopt::onebit_lamb onebit_lamb;
    onebit_lamb.freeze_step = 14, onebit_lamb.min_trust = 15, onebit_lamb.max_trust = 16;
    onebit_lamb.trust_beta = 17, onebit_lamb.trust_threshold = 18;
    onebit_lamb.trust_min_change = 19, onebit_lamb.trust_max_change = 20;
    const dsopt_group made = adaptive(onebit_lamb);
    EXPECT_EQ(made.freeze_step, 14);
    EXPECT_EQ(made.min_trust, 15);
    EXPECT_EQ(made.max_trust, 16);
    EXPECT_EQ(made.trust_beta, 17);
    EXPECT_EQ(made.trust_threshold, 18);
    EXPECT_EQ(made.trust_min_change, 19);
    EXPECT_EQ(made.trust_max_change, 20);
}

template <class Group> using exp_avg_format_of = decltype(std::declval<Group>().exp_avg_format);
template <class Group> using exp_avg_sq_format_of = decltype(std::declval<Group>().exp_avg_sq_format);

/// Expects the members for formats that this algorithm must have, and that they are passed to the library.
template <class Group> void expect_formats(Group group, bool exp_avg, bool exp_avg_sq) {
    constexpr bool has_exp_avg = dsopt::detail::has<exp_avg_format_of, Group>;
    constexpr bool has_exp_avg_sq = dsopt::detail::has<exp_avg_sq_format_of, Group>;
    const std::int32_t algorithm = dsopt_group(group).algorithm;
    EXPECT_EQ(has_exp_avg, exp_avg) << algorithm;
    EXPECT_EQ(has_exp_avg_sq, exp_avg_sq) << algorithm;
    if constexpr (has_exp_avg) group.exp_avg_format = dsopt::moment::e4m3;
    if constexpr (has_exp_avg_sq) group.exp_avg_sq_format = dsopt::moment::bf16_random;
    const dsopt_group made = group;
    EXPECT_EQ(made.exp_avg_format, exp_avg ? DSOPT_MOMENT_E4M3 : DSOPT_MOMENT_F32) << algorithm;
    EXPECT_EQ(made.exp_avg_sq_format, exp_avg_sq ? DSOPT_MOMENT_BF16_RANDOM : DSOPT_MOMENT_F32) << algorithm;
}

TEST(CppGroup, HasFormatsOfTheMomentsOfItsAlgorithm) {
    expect_formats(dsopt::adam{}, true, true);
    expect_formats(dsopt::adamw{}, true, true);
    expect_formats(dsopt::adam_legacy{}, true, true);
    expect_formats(dsopt::lamb{}, true, true);
    expect_formats(dsopt::sgd{}, true, false);
    expect_formats(dsopt::lion{}, true, false);
    expect_formats(dsopt::muon{}, true, false);
    expect_formats(dsopt::adagrad{}, false, true);
    expect_formats(dsopt::onebit_adam{}, false, false);
    expect_formats(dsopt::zero_one_adam{}, false, false);
    expect_formats(dsopt::onebit_lamb{}, false, false);
}

TEST(CppLibrary, ReturnsVersionAndBuildInfo) {
    EXPECT_EQ(dsopt::version(), dsopt_version());
    EXPECT_EQ(dsopt::abi_version(), DSOPT_ABI_VERSION);
    EXPECT_NE(std::string(dsopt::build_info()).find("\"version\""), std::string::npos);
}

} // namespace types_tests
