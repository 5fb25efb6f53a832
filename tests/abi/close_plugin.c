// SPDX-License-Identifier: Apache-2.0
// close_plugin PLUGIN.so: loads a plugin with a copy of dsopt, takes a step on several threads and closes the plugin.
// The copy's worker threads still wait for work then, so the plugin must stay in memory.
#define _DEFAULT_SOURCE // usleep
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const void *(*first)(int fail, const char **last_error) = NULL;
    const char *error;
    void *plugin = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL,
         *symbol = plugin != NULL ? dlsym(plugin, "first") : NULL;
    if (symbol != NULL) memcpy(&first, &symbol, sizeof first); // ISO C has no such cast
    if (first == NULL || first(0, &error) == NULL || dlclose(plugin) != 0) {
        fprintf(stderr, "close_plugin: cannot load, use or close the plugin\n");
        return 1;
    }
    usleep(100000);
    return 0;
}
