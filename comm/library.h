// SPDX-License-Identifier: Apache-2.0
// Libraries that are found at run time. Nothing here links to them or needs their headers.
#pragma once
#include "base/status.h"
#include <cstdlib>
#include <dlfcn.h>

namespace dsopt {

class Library {
public:
    /// A copy that the process has: in its global scope, which `known` is looked up in, or loaded under `name`.
    static Library loaded(const char *name, const char *known) {
        if (dlsym(RTLD_DEFAULT, known) != nullptr) return Library(RTLD_DEFAULT, true);
        void *const handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        return Library(handle, handle != nullptr);
    }
    /// That one, else the one that the environment's `variable` names, else `name`. Throws DSOPT_ERR_MISSING.
    static Library any(const char *name, const char *known, const char *variable) {
        Library library = loaded(name, known);
        if (library.found_) return library;
        const char *const path = secure_getenv(variable);
        // A relative path would be another library in another folder.
        if (path != nullptr && path[0] != '/')
            throw Error(DSOPT_ERR_ARGUMENT, "%s is '%s', not an absolute path", variable, path);
        const char *const wanted = path != nullptr ? path : name;
        // Never unloaded: its threads and the caller's handles may outlive any comm.
        library = Library(dlopen(wanted, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), true);
        if (library.handle_ == nullptr) {
            const char *const reason = dlerror();
            throw Error(DSOPT_ERR_MISSING, "%s cannot be loaded: %s. Load it before, or name it in %s", wanted,
                        reason != nullptr ? reason : "unknown", variable);
        }
        return library;
    }

    explicit operator bool() const { return found_; }
    /// What dsopt_build_info tells; nothing is loaded to find out.
    static const char *state(const char *name, const char *known) {
        return loaded(name, known) ? "loaded" : "looked for when a comm is made";
    }

    /// Becomes a pointer to whatever kind of function it is assigned to.
    struct Symbol {
        void *address;
        template <class F> operator F *() const { return reinterpret_cast<F *>(address); }
    };
    /// NULL if it is not there.
    Symbol find(const char *name) const { return {dlsym(handle_, name)}; }
    Symbol need(const char *name) const {
        const Symbol symbol = find(name);
        if (symbol.address == nullptr)
            throw Error(DSOPT_ERR_MISSING, "the library found is too old: it has no %s", name);
        return symbol;
    }

private:
    Library(void *handle, bool found) : handle_(handle), found_(found) {}
    void *handle_;
    bool found_;
};

} // namespace dsopt
