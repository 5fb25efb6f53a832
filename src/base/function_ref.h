// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <type_traits>
#include <utility>

namespace dsopt {

/// Non-owning reference to a callable, which must outlive it. std::function would allocate in every step.
template <class Signature> class FunctionRef;
template <class R, class... A> class FunctionRef<R(A...)> {
public:
    template <class F, class = std::enable_if_t<!std::is_same_v<F, FunctionRef>>>
    FunctionRef(const F &function) :
        object_(&function),
        call_([](const void *object, A... arguments) -> R {
            return (*static_cast<const F *>(object))(std::forward<A>(arguments)...);
        }) {}
    R operator()(A... arguments) const { return call_(object_, std::forward<A>(arguments)...); }

private:
    const void *object_;
    R (*call_)(const void *, A...);
};

} // namespace dsopt
