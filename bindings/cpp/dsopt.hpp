/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_HPP
#define DSOPT_HPP
/**
 * dsopt for C++17 and later: header-only, on top of dsopt.h.
 *
 *     dsopt::context ctx;
 *     dsopt::optimizer opt{ctx};
 *     opt.add_group(dsopt::adamw{3e-4}, {{dsopt::view(w), "w"}, {dsopt::view(b), "b"}});
 *     const dsopt::tensor grads[] = {dsopt::view(gw), dsopt::view(gb)};
 *     for (;;) { backward(); opt.step(grads); ctx.zero_grad(grads); }
 *     opt.save("run.safetensors");
 *
 * dsopt.h is the reference: its documentation of a function, a field or a flag holds for the same name here. In
 * addition:
 *
 *  - A failure is thrown, as dsopt::error or a class derived from it. Its text names the parameter.
 *  - Handles can be moved and not copied. Moved-from handles can be assigned to and destroyed; other calls throw
 *    argument_error.
 *  - An exception that is thrown in a hook, a pool, a comm of a class, a sink or a source does not cross the library.
 *    It is rethrown by the dsopt call from which the hook was called. An exception of a hook that a destructor calls is
 *    dropped. Hook and call must be compiled into one program or shared library, and the call must be one of this
 *    header: a call from C, or from another library, returns only the status, and the next call on that thread rethrows
 *    the exception.
 *  - Options are aggregates with defaults: `{.max_norm = 1}` in C++20, or name a variable and set its members.
 *  - A span is borrowed for the call. It is made from anything with data() and size(), an array, or a braced list.
 *  - Nothing is allocated per step and no list is copied.
 */
#include "dsopt/comm.hpp"
#include "dsopt/context.hpp"
#include "dsopt/groups.hpp"
#include "dsopt/optimizer.hpp"
#include "dsopt/scaler.hpp"
#include "dsopt/types.hpp"
#endif
