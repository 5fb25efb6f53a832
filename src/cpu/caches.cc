// SPDX-License-Identifier: Apache-2.0
#include "cpu/caches.h"
#include "base/fork.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace dsopt::cpu {
namespace {

/// The first word of a sysfs file that describes a cache; empty if the file cannot be read.
struct Word {
    char text[32] = "";
    Word(int cache, const char *what) {
        char path[96];
        std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", cache, what);
        const std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path, "re"),
                                                          [](FILE *f) { return std::fclose(f); });
        if (file && std::fscanf(file.get(), "%31s", text) != 1) text[0] = 0;
    }
};

/// Parses a size as in sysfs, e.g. "1024K".
int64_t bytes_of(const char *size) {
    char *unit = nullptr;
    const int64_t number = std::strtoll(size, &unit, 10);
    return *unit == 'M' ? number << 20 : *unit == 'K' ? number << 10 : number;
}

CacheSizes read_sizes() {
    int64_t core = 0, last = 0;
    // sysconf() is not used: in glibc 2.36 its size of the third level is the sum over all dies of a processor.
    int core_level = 0, last_level = 0;
    for (int cache = 0; cache < 16; ++cache) {
        const Word level(cache, "level"), type(cache, "type"), size(cache, "size");
        if (level.text[0] == 0) break;
        if (std::strcmp(type.text, "Instruction") == 0) continue;
        const int number = std::atoi(level.text);
        const int64_t bytes = bytes_of(size.text);
        if (number > last_level) last_level = number, last = bytes;
        if (number > core_level && number <= 2) core_level = number, core = bytes;
    }
    return {core > 0 ? core : int64_t(1) << 20, last > 0 ? last : int64_t(32) << 20};
}

} // namespace

CacheSizes cache_sizes() {
    long long core = 0, last = 0;
    const char *const wanted = secure_getenv("DSOPT_CACHES");
    if (wanted != nullptr && std::sscanf(wanted, "%lld,%lld", &core, &last) == 2) return {core, last};
    static constinit Lazy<CacheSizes> found; // cached: read_sizes() opens about fifty files
    return found.get(read_sizes);
}

} // namespace dsopt::cpu
