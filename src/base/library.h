// SPDX-License-Identifier: Apache-2.0
// Libraries that are loaded at run time. Nothing here links to them or needs their headers.
#pragma once
#include "base/status.h"
#include <cstdlib>
#include <dlfcn.h>
#include <optional>

namespace dsopt {

/// Names by which a library is found.
struct LibraryNames {
    const char *file;
    const char *known;    // name of a function of the library
    const char *variable; // environment variable with the path of another file
    // Name of a package of PyPI in which bindings/python finds the library, if there is one.
    const char *package = nullptr;
};

class Library {
public:
    /// Returns the copy that the process has loaded already: in its global scope, if that has the function `known`, or
    /// by file name.
    static std::optional<Library> loaded(const LibraryNames &names) {
        if (dlsym(RTLD_DEFAULT, names.known) != nullptr) return Library(RTLD_DEFAULT);
        if (void *const handle = dlopen(names.file, RTLD_NOW | RTLD_NOLOAD)) return Library(handle);
        return {};
    }
    /// Returns the copy that is loaded already, otherwise loads the file that the environment names, otherwise `file`.
    /// Throws DSOPT_ERR_MISSING.
    static Library any(const LibraryNames &names) {
        if (const auto library = loaded(names)) return *library;
        const char *const path = secure_getenv(names.variable);
        // A relative path would name another library in another working directory.
        if (path != nullptr && path[0] != '/')
            throw Error(DSOPT_ERR_ARGUMENT, "%s is '%s', not an absolute path", names.variable, path);
        const char *const wanted = path != nullptr ? path : names.file;
        // The library is never unloaded: its threads and the caller's handles may outlive any object of dsopt.
        if (void *const handle = dlopen(wanted, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) return Library(handle);
        const char *const reason = dlerror();
        const char *const package = path == nullptr ? names.package : nullptr;
        throw Error(DSOPT_ERR_MISSING, "%s cannot be loaded: %s. Load it before, or name it in %s%s%s", wanted,
                    reason != nullptr ? reason : "unknown", names.variable,
                    package != nullptr ? ", or, in Python, pip install " : "", package != nullptr ? package : "");
    }
    /// Returns the library for a comm. The caller's own communicator, if any, belongs to the copy that the process has.
    static Library for_comm(const LibraryNames &names, const dsopt_comm_desc &desc) {
        if (desc.native == nullptr) return any(names);
        if (const auto library = loaded(names)) return *library;
        throw Error(DSOPT_ERR_MISSING, "dsopt_comm_desc.native: this process has loaded no %s to use it with",
                    names.file);
    }
    /// Returns the text for dsopt_build_info; loads nothing.
    static const char *state(const LibraryNames &names) {
        return loaded(names) ? "loaded" : "looked for when a comm is made";
    }

    /// Converts to a function pointer of any type.
    struct Symbol {
        void *address;
        template <class F> operator F *() const { return reinterpret_cast<F *>(address); }
    };
    /// Returns NULL if the library has no such function.
    Symbol find(const char *name) const { return {dlsym(handle_, name)}; }
    Symbol need(const char *name) const {
        const Symbol symbol = find(name);
        if (symbol.address == nullptr)
            throw Error(DSOPT_ERR_MISSING, "the library found is too old: it has no %s", name);
        return symbol;
    }

private:
    explicit Library(void *handle) : handle_(handle) {}
    void *handle_; // RTLD_DEFAULT: the global scope
};

} // namespace dsopt
