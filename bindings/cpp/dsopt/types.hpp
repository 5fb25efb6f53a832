/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_TYPES_HPP
#define DSOPT_TYPES_HPP
/** Errors, constants, spans and tensors. Programs include dsopt.hpp. */
#include <cstddef>
#include <cstdint>
#include <dsopt.h>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace dsopt {

/* ----------------------------------------------------------------------------------------------------------- errors */
/// A call failed. what() is the name of the status and the library's text.
class error : public std::runtime_error {
public:
    error(dsopt_status status, const std::string &text) :
        std::runtime_error(std::string(dsopt_status_name(status)) + ": " + text),
        status_(status) {}
    dsopt_status status() const noexcept { return status_; }
    /// Such as "DSOPT_ERR_SHAPE". Static storage.
    const char *name() const noexcept { return dsopt_status_name(status_); }
    /// The library's text alone.
    const char *text() const noexcept { return what() + std::char_traits<char>::length(name()) + 2; }

private:
    dsopt_status status_;
};
/// An argument is invalid: its value, shape, dtype, alignment, overlap, device, workspace or version.
struct argument_error : error {
    using error::error;
};
/// An option is not supported in this combination or build, or has no effect.
struct unsupported_error : error {
    using error::error;
};
/// The call is not possible now: order of calls, another thread, a fork, the skip budget, or a pool that did not run
/// every index.
struct state_error : error {
    using error::error;
};
/// Host or backend memory is exhausted.
struct memory_error : error {
    using error::error;
};
/// A driver or library that the call needs is not on this machine.
struct missing_error : error {
    using error::error;
};
/// Opening, reading, writing, flushing or renaming a file failed.
struct io_error : error {
    using error::error;
};
/// The device or its driver failed.
struct backend_error : error {
    using error::error;
};
/// A collective failed. The comm is unusable.
struct comm_error : error {
    using error::error;
};
/// A peer did not join a collective within the comm's time-out.
struct timeout : comm_error {
    using comm_error::comm_error;
};
/// comm::abort was called.
struct aborted : comm_error {
    using comm_error::comm_error;
};
/// A file is not a dsopt checkpoint, is damaged, or belongs to another optimizer.
struct checkpoint_error : error {
    using error::error;
};

namespace detail {

/// The first exception of a hook in this thread's call. The flag is separate so that a call without an exception only
/// reads a bool.
inline thread_local bool hook_threw = false;
inline std::exception_ptr &hook_exception() noexcept {
    thread_local std::exception_ptr first;
    return first;
}
inline void keep_exception() noexcept {
    if (hook_threw) return;
    hook_exception() = std::current_exception();
    hook_threw = true;
}

[[noreturn]] inline void fail(dsopt_status status, const std::string &text) {
    switch (status) {
    case DSOPT_ERR_UNSUPPORTED: throw unsupported_error(status, text);
    case DSOPT_ERR_STATE:
    case DSOPT_ERR_BUSY:
    case DSOPT_ERR_FORKED:
    case DSOPT_ERR_SKIPS:
    case DSOPT_ERR_HOOK: throw state_error(status, text);
    case DSOPT_ERR_NOMEM: throw memory_error(status, text);
    case DSOPT_ERR_MISSING: throw missing_error(status, text);
    case DSOPT_ERR_IO: throw io_error(status, text);
    case DSOPT_ERR_INTERNAL: throw error(status, text);
    case DSOPT_ERR_BACKEND: throw backend_error(status, text);
    case DSOPT_ERR_COMM: throw comm_error(status, text);
    case DSOPT_ERR_TIMEOUT: throw timeout(status, text);
    case DSOPT_ERR_ABORTED: throw aborted(status, text);
    case DSOPT_ERR_FORMAT:
    case DSOPT_ERR_CHECKSUM:
    case DSOPT_ERR_MISMATCH: throw checkpoint_error(status, text);
    default: break;
    }
    if (status >= DSOPT_ERR_ARGUMENT && status <= DSOPT_ERR_VERSION) throw argument_error(status, text);
    throw error(status, text); // of a newer library
}
[[noreturn]] inline void fail_call(dsopt_status status) {
    if (hook_threw) {
        hook_threw = false;
        std::rethrow_exception(std::exchange(hook_exception(), nullptr));
    }
    fail(status, dsopt_last_error());
}
inline void check(dsopt_status status) {
    if (status != DSOPT_OK || hook_threw) fail_call(status);
}

/// Deleter that calls `Destroy`. Exceptions of hooks in this call are dropped.
template <class T, void (*Destroy)(T *)> struct destroyer {
    void operator()(T *object) const noexcept {
        const bool before = hook_threw;
        Destroy(object);
        if (!hook_threw || before) return;
        hook_threw = false;
        hook_exception() = nullptr;
    }
};
template <class T, void (*Destroy)(T *)> using handle = std::unique_ptr<T, destroyer<T, Destroy>>;

/// Returns the handle that `create(T **)` creates.
template <class Handle, class Create> Handle make(Create &&create) {
    typename Handle::pointer made = nullptr;
    const dsopt_status status = create(&made);
    Handle owner(made); // a hook may have thrown although the call succeeded
    check(status);
    return owner;
}

template <class Desc> Desc desc_of() noexcept {
    Desc desc = Desc();
    desc.size = sizeof desc;
    return desc;
}

template <class Size> std::int64_t count(const Size &list) noexcept { return static_cast<std::int64_t>(list.size()); }

template <class, template <class> class Expression, class T> struct detector : std::false_type {};
template <template <class> class Expression, class T>
struct detector<std::void_t<Expression<T>>, Expression, T> : std::true_type {};
/// True if `Expression<T>` is a type, such as the type of a call of a member that T may have.
template <template <class> class Expression, class T> constexpr bool has = detector<void, Expression, T>::value;

} // namespace detail

/* ------------------------------------------------------------------------------------------------------- constants */
enum class dtype : std::int32_t {
    f32 = DSOPT_DTYPE_F32,
    f16 = DSOPT_DTYPE_F16,
    bf16 = DSOPT_DTYPE_BF16,
    i32 = DSOPT_DTYPE_I32,
    f64 = DSOPT_DTYPE_F64,
    /* Of state tensors only, as i32. */
    i16 = DSOPT_DTYPE_I16,
    u8 = DSOPT_DTYPE_U8,
    f8_e4m3 = DSOPT_DTYPE_F8_E4M3
};
/// How a moment is stored between steps; within a step it is fp32. exp_avg_sq: f32, bf16_random or q8. sum: f32 or
/// bf16_random.
enum class moment : std::int32_t {
    f32 = DSOPT_MOMENT_F32,
    bf16 = DSOPT_MOMENT_BF16,
    bf16_random = DSOPT_MOMENT_BF16_RANDOM,
    e4m3 = DSOPT_MOMENT_E4M3,
    q8 = DSOPT_MOMENT_Q8
};
/// Muon: triples of the Newton-Schulz iterations: `ns_a`, `ns_b` and `ns_c` of the group in every step, or a preset.
enum class ns_schedule : std::int32_t {
    constant = DSOPT_NS_CONSTANT,
    polar_express = DSOPT_NS_POLAR_EXPRESS,
    you = DSOPT_NS_YOU
};
/// Muon: factor of the learning rate for a matrix of r outputs and c inputs.
enum class adjust : std::int32_t {
    /// sqrt(max(1, r / c)).
    original = DSOPT_ADJUST_ORIGINAL,
    /// 0.2 sqrt(max(r, c)).
    match_rms_adamw = DSOPT_ADJUST_MATCH_RMS_ADAMW,
    /// sqrt(r / c).
    spectral_unclamped = DSOPT_ADJUST_SPECTRAL,
    /// 1.
    none = DSOPT_ADJUST_NONE
};
enum class backend : std::int32_t { cpu = DSOPT_BACKEND_CPU, cuda = DSOPT_BACKEND_CUDA };
enum class log_level : std::int32_t {
    automatic = 0,
    error = DSOPT_LOG_ERROR,
    warn = DSOPT_LOG_WARN,
    info = DSOPT_LOG_INFO,
    trace = DSOPT_LOG_TRACE
};
enum class compat : std::int32_t { none = DSOPT_COMPAT_NONE, deepspeed = DSOPT_COMPAT_DEEPSPEED };
enum class nonfinite : std::int32_t {
    automatic = DSOPT_NONFINITE_AUTO,
    skip = DSOPT_NONFINITE_SKIP,
    apply = DSOPT_NONFINITE_APPLY
};
enum class masters : std::int32_t {
    per_tensor = DSOPT_MASTERS_PER_TENSOR,
    flat = DSOPT_MASTERS_FLAT,
    remainder = DSOPT_MASTERS_REMAINDER
};
/// Data-parallel ranks over which state is spread: none, all of them, or those of each node.
enum class shard : std::int32_t { none = 0, data = DSOPT_OPTIMIZER_SHARD, node = DSOPT_OPTIMIZER_SHARD_NODE };
enum class key : std::int32_t {
    lr = DSOPT_KEY_LR,
    beta1 = DSOPT_KEY_BETA1,
    beta2 = DSOPT_KEY_BETA2,
    eps = DSOPT_KEY_EPS,
    weight_decay = DSOPT_KEY_WEIGHT_DECAY,
    group_max_norm = DSOPT_KEY_GROUP_MAX_NORM,
    min_trust = DSOPT_KEY_MIN_TRUST,
    max_trust = DSOPT_KEY_MAX_TRUST,
    bias_correction = DSOPT_KEY_BIAS_CORRECTION,
    eps_inside_sqrt = DSOPT_KEY_EPS_INSIDE_SQRT,
    algorithm = DSOPT_KEY_ALGORITHM,
    freeze_step = DSOPT_KEY_FREEZE_STEP,
    eps_uncorrected = DSOPT_KEY_EPS_UNCORRECTED,
    momentum = DSOPT_KEY_MOMENTUM,
    dampening = DSOPT_KEY_DAMPENING,
    nesterov = DSOPT_KEY_NESTEROV,
    lr_decay = DSOPT_KEY_LR_DECAY,
    initial_accumulator_value = DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE,
    ns_steps = DSOPT_KEY_NS_STEPS,
    ns_a = DSOPT_KEY_NS_A,
    ns_b = DSOPT_KEY_NS_B,
    ns_c = DSOPT_KEY_NS_C,
    adjust = DSOPT_KEY_ADJUST,
    ns_schedule = DSOPT_KEY_NS_SCHEDULE,
    ns_dtype = DSOPT_KEY_NS_DTYPE,
    max_norm = DSOPT_KEY_MAX_NORM,
    calls = DSOPT_KEY_CALLS,
    max_value = DSOPT_KEY_MAX_VALUE,
    skip_budget = DSOPT_KEY_SKIP_BUDGET
};
constexpr std::int32_t all_groups = DSOPT_ALL_GROUPS;
/// Parts of the state; they can be OR-ed.
enum class parts : std::int32_t {
    masters = DSOPT_RESET_MASTERS,
    moments = DSOPT_RESET_MOMENTS,
    counters = DSOPT_RESET_COUNTERS,
    grads = DSOPT_RESET_GRADS,
    errors = DSOPT_RESET_ERRORS,
    /// Gradients that were passed to optimizer::ready; collective with buckets.
    ready = DSOPT_RESET_READY
};
constexpr parts operator|(parts a, parts b) noexcept {
    return static_cast<parts>(static_cast<std::int32_t>(a) | static_cast<std::int32_t>(b));
}
enum class reduction : std::int32_t {
    full = DSOPT_REDUCTION_FULL,
    compressed = DSOPT_REDUCTION_COMPRESSED,
    local = DSOPT_REDUCTION_LOCAL
};
enum class profile : std::int32_t {
    standard = DSOPT_PROFILE_DEFAULT,
    fused = DSOPT_PROFILE_FUSED,
    unfused = DSOPT_PROFILE_UNFUSED,
    dynamic = DSOPT_PROFILE_DYNAMIC
};
enum class comm_kind : std::int32_t {
    self = DSOPT_COMM_KIND_SELF,
    local = DSOPT_COMM_KIND_LOCAL,
    nccl = DSOPT_COMM_KIND_NCCL,
    hccl = DSOPT_COMM_KIND_HCCL
};
enum class op : std::int32_t { sum = DSOPT_OP_SUM, max = DSOPT_OP_MAX, mean = DSOPT_OP_MEAN };
enum class memory : std::int32_t { host = DSOPT_MEMORY_HOST, backend = DSOPT_MEMORY_BACKEND };
enum class norm_kind : std::int32_t { l2 = DSOPT_NORM_L2, max = DSOPT_NORM_MAX };

/* ----------------------------------------------------------------------------------------------- spans and tensors */
/// A view of contiguous values that it does not own.
template <class T> class span {
    template <class C> using element = std::remove_pointer_t<decltype(std::data(std::declval<C &>()))>;
    template <class C> using sized = decltype(std::size(std::declval<C &>()));
    // As in std::span: the conversion from C * to T * may only add const, and a list that does not outlive the call is
    // const.
    template <class C, class = void> struct fits : std::false_type {};
    template <class C>
    struct fits<C, std::void_t<element<std::remove_reference_t<C>>, sized<std::remove_reference_t<C>>>>
        : std::bool_constant<std::is_convertible_v<element<std::remove_reference_t<C>> (*)[], T (*)[]> &&
                             (std::is_lvalue_reference_v<C> || std::is_const_v<T>)> {};

public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// A span of a vector, an array, a std::span and the like.
    template <class C, class = std::enable_if_t<!std::is_same_v<std::decay_t<C>, span> && fits<C>::value>>
    constexpr span(C &&list) noexcept : data_(std::data(list)), size_(std::size(list)) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime" // a span of a braced list is an argument
#endif
    /// A span of a braced list, which lives until the end of the call.
    template <class U = T, class = std::enable_if_t<std::is_const_v<U>>>
    constexpr span(std::initializer_list<std::remove_const_t<T>> list) noexcept :
        data_(list.begin()),
        size_(list.size()) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/// Storage of IEEE half precision, of bfloat16 and of FP8 E4M3: the bits.
enum class f16 : std::uint16_t {};
enum class bf16 : std::uint16_t {};
enum class f8_e4m3 : std::uint8_t {};

/// The dtype of a C++ type. Specialize it for another type of 16 bits, such as __half.
template <class T> struct dtype_of;
template <> struct dtype_of<float> { static constexpr dtype value = dtype::f32; };
template <> struct dtype_of<f16> { static constexpr dtype value = dtype::f16; };
template <> struct dtype_of<bf16> { static constexpr dtype value = dtype::bf16; };
template <> struct dtype_of<std::int32_t> { static constexpr dtype value = dtype::i32; };
template <> struct dtype_of<std::int16_t> { static constexpr dtype value = dtype::i16; };
template <> struct dtype_of<std::uint8_t> { static constexpr dtype value = dtype::u8; };
template <> struct dtype_of<f8_e4m3> { static constexpr dtype value = dtype::f8_e4m3; };

using tensor = dsopt_tensor;

namespace detail {
/// True if the memory of an argument of this type outlives it. The memory of a temporary vector or array does not, the
/// memory of a span does: const spans return writable elements, because they do not own them.
template <class C>
constexpr bool outlives = std::is_lvalue_reference_v<C> ||
                          std::is_convertible_v<decltype(std::data(std::declval<const std::remove_reference_t<C> &>())),
                                                decltype(std::data(std::declval<std::remove_reference_t<C> &>()))>;
} // namespace detail

/// A tensor of `numel` elements. nullptr: absent, or bound later.
inline tensor view(void *data, std::int64_t numel, dtype type) noexcept {
    return {data, numel, static_cast<std::int32_t>(type), 0};
}
template <class T> tensor view(T *data, std::int64_t numel) noexcept {
    static_assert(!std::is_const_v<T>, "read_only makes tensors of constants");
    return view(static_cast<void *>(data), numel, dtype_of<T>::value);
}
/// A tensor of all elements of an array, a vector or a span.
template <class C, class = std::enable_if_t<detail::outlives<C>>>
auto view(C &&list) -> decltype(view(std::data(list), std::int64_t{})) {
    return view(std::data(list), detail::count(span<std::remove_pointer_t<decltype(std::data(list))>>(list)));
}
/// A tensor of constants, for lists that dsopt.h calls inputs: gradients of a step without zero_grads, x of axpby.
template <class T> tensor read_only(const T *data, std::int64_t numel) noexcept {
    return view(const_cast<T *>(data), numel);
}
template <class C, class = std::enable_if_t<detail::outlives<C>>>
auto read_only(C &&list) -> decltype(read_only(std::data(list), std::int64_t{})) {
    return read_only(std::data(list),
                     detail::count(span<const std::remove_pointer_t<decltype(std::data(list))>>(list)));
}

namespace detail {
/// The handle of an optional object. Fails if it was moved from: the call would ignore it.
template <class Object> auto get_or_null(const char *name, const Object *object) {
    if (object != nullptr && !*object) fail(DSOPT_ERR_ARGUMENT, std::string(name) + " was moved from");
    return object != nullptr ? object->get() : nullptr;
}
/// Text for C. Fails if it has a zero byte, where C would end it.
inline const char *text_of(const std::string &name, const std::string &text) {
    if (text.find('\0') != std::string::npos) fail(DSOPT_ERR_ARGUMENT, name + " has a zero byte");
    return text.c_str();
}
[[noreturn]] inline void refuse_size(const char *name, std::size_t size, const char *needed, std::int64_t number) {
    fail(DSOPT_ERR_SHAPE,
         std::string(name) + " has " + std::to_string(size) + " entries, " + needed + " " + std::to_string(number));
}
/// Data of an optional list, whose length is checked because it is not passed to the library.
template <class T> T *exactly(const char *name, span<T> list, std::int64_t needed) {
    if (!list.empty() && count(list) != needed) refuse_size(name, list.size(), "needed are", needed);
    return list.empty() ? nullptr : list.data();
}
/// The same for an array, which may be longer.
template <class T> T *at_least(const char *name, span<T> list, std::int64_t needed) {
    if (!list.empty() && count(list) < needed) refuse_size(name, list.size(), "needed are", needed);
    return list.empty() ? nullptr : list.data();
}
} // namespace detail

} // namespace dsopt
#endif
