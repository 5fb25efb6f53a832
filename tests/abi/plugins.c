// SPDX-License-Identifier: Apache-2.0
// plugins FIRST.so SECOND.so: a program that uses the shared dsopt and loads two plugins with a static copy each. No
// copy may see the state of another, although all their symbols are global.
#include <dlfcn.h>
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef const void *plugin_entry(int fail, const char **last_error);

static void expect(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "plugins: does not hold: %s\n", what);
    exit(1);
}

static plugin_entry *load(const char *file, const char *name) {
    void *plugin = dlopen(file, RTLD_NOW | RTLD_GLOBAL), *symbol = plugin != NULL ? dlsym(plugin, name) : NULL;
    plugin_entry *entry;
    if (symbol == NULL) fprintf(stderr, "%s\n", dlerror());
    expect(symbol != NULL, name);
    memcpy(&entry, &symbol, sizeof entry); // ISO C has no cast from an object pointer to a function pointer
    return entry;
}

int main(int argc, char **argv) {
    const char *error;
    expect(argc == 3, "two plugins are given");
    plugin_entry *first = load(argv[1], "first"), *second = load(argv[2], "second");

    const void *a = first(1, &error);
    expect(a != NULL, "the first plugin's call fails");
    expect(*error != 0, "the first plugin has an error text");
    const void *b = second(0, &error);
    expect(b != NULL, "the second plugin takes a step");
    expect(*error == 0, "the second plugin sees no failure of the first");
    expect(*dsopt_last_error() == 0, "the program sees no failure of a plugin");
    const void *shared = dsopt_build_info();
    expect(a != b && a != shared && b != shared, "there are three copies of the library");
    return 0;
}
