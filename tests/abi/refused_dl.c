// SPDX-License-Identifier: Apache-2.0
// refused_dl LIBRARY: prints the reason why the library is not loaded, if the struct is then zero and the library is
// closed.
#include <dsopt_dl.h>
#include <stdio.h>

int main(int argc, char **argv) {
    dsopt_dl dl, zero;
    const char *problem;
    if (argc != 2) return 2;
    memset(&dl, 255, sizeof dl);
    memset(&zero, 0, sizeof zero);
    problem = dsopt_dl_load(&dl, argv[1]);
    if (!problem) return 3;
    puts(problem);
    if (memcmp(&dl, &zero, sizeof dl) != 0) return 4;
    if (dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD)) return 5;
    dsopt_dl_unload(&dl); // nothing is loaded
    return 0;
}
