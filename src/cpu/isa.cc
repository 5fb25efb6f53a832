// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"
#include "base/fork.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dsopt::cpu {
namespace {

constexpr const char *kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"}; // by Isa

#if defined(__x86_64__)
bool query_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

} // namespace

Isa processor_isa() {
#if defined(__x86_64__)
    static constinit Lazy<bool> known; // cached: with a hypervisor the query takes microseconds
    const bool f16c = known.get(query_f16c);
    if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::generic;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return Isa::avx2;
    return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
#else
    return Isa::generic;
#endif
}

Isa chosen_isa() {
    const char *const wanted = secure_getenv("DSOPT_ISA");
    if (wanted == nullptr) return processor_isa();
    for (size_t k = 0; k < std::size(kNames); ++k)
        if (std::strcmp(wanted, kNames[k]) == 0) return std::min(Isa(k), processor_isa());
    return Isa::generic;
}

const char *unknown_isa() {
    const char *const wanted = secure_getenv("DSOPT_ISA");
    for (const char *known : kNames)
        if (wanted == nullptr || std::strcmp(wanted, known) == 0) return nullptr;
    return wanted;
}

} // namespace dsopt::cpu
