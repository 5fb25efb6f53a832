// SPDX-License-Identifier: Apache-2.0
#include "emulated.h"
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <unistd.h>

namespace replay {

bool is_emulated() { return dlsym(RTLD_DEFAULT, "cudaMalloc") != nullptr; }

void become_emulated(char **argv) {
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) {
        std::fprintf(stderr, "dsopt-replay: /proc/self/exe: %s\n", std::strerror(errno));
        return;
    }
    self[length] = 0;
    // The library is next to this program, in the folder of the tests that link it.
    std::string folder(self);
    folder.resize(folder.find_last_of('/'));
    folder += "/cuda";
    // Uses the search path instead of a preload, because a sanitizer's library must be the first preloaded one.
    const char *before = std::getenv("LD_LIBRARY_PATH");
    const std::string search_path = before != nullptr && *before != 0 ? folder + ":" + before : folder;
    // The second condition ends a recursion: this program has already been restarted, without success.
    if (access((folder + "/libdsopt.so.2").c_str(), R_OK) != 0 ||
        (before != nullptr && std::strncmp(before, folder.c_str(), folder.size()) == 0)) {
        std::fprintf(stderr, "dsopt-replay: no emulated backend in %s\n", folder.c_str());
        return;
    }
    setenv("LD_LIBRARY_PATH", search_path.c_str(), 1);
    execv(self, argv);
    std::fprintf(stderr, "dsopt-replay: %s: %s\n", self, std::strerror(errno));
}

} // namespace replay
