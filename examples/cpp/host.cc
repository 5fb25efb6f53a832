// SPDX-License-Identifier: Apache-2.0
// host PLUGIN.so: loads the plugin and calls it to fit four numbers. The host is not linked to dsopt.
#include "plugin.h"
#include <cstdio>
#include <dlfcn.h>

int main(int argc, char **argv) {
    void *const plugin = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    fit_function *const loaded = plugin != nullptr ? reinterpret_cast<fit_function *>(dlsym(plugin, "fit")) : nullptr;
    if (loaded == nullptr) {
        std::fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: host PLUGIN.so");
        return 1;
    }
    const float target[] = {1, -2, 3, 0.5f};
    float w[4] = {};
    char error[500] = "";
    if (loaded(w, target, 4, 1000, error, sizeof error) != 0) {
        std::fprintf(stderr, "%s\n", error);
        return 1;
    }
    for (const float value : w) std::printf("%.1f ", static_cast<double>(value));
    std::printf("\n");
    dlclose(plugin);
    return 0;
}
