// SPDX-License-Identifier: Apache-2.0
// The C boundary: no exception passes it.
#pragma once
#include "base/status.h"
#include <new>
#include <utility>

namespace dsopt {

template <class F> dsopt_status fence(F &&body) noexcept {
    try {
        std::forward<F>(body)();
        return DSOPT_OK;
    } catch (const Error &e) {
        set_last_error(e.what());
        return e.status();
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return DSOPT_ERR_NOMEM;
    } catch (const std::exception &e) {
        set_last_error(e.what());
        return DSOPT_ERR_INTERNAL;
    } catch (...) {
        set_last_error("unknown exception");
        return DSOPT_ERR_INTERNAL;
    }
}

} // namespace dsopt
