// SPDX-License-Identifier: Apache-2.0
#include "demo_text.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char licences[] = "/usr/share/common-licenses";
enum { MINIMUM_SIZE = 2000, MAXIMUM_SIZE = 1 << 28 }; // some devices never end

struct bytes {
    uint8_t *data;
    size_t size, capacity;
};

// Appends a file. Reads to the end without querying the length, so that pipes work too.
static int append_file(struct bytes *bytes, const char *path) {
    FILE *file = fopen(path, "rb");
    size_t count = 0;
    if (!file) return -1;
    do {
        if (bytes->capacity - bytes->size < 65536) {
            const size_t capacity = 2 * bytes->capacity + 65536;
            uint8_t *data = realloc(bytes->data, capacity);
            if (!data) {
                fclose(file);
                errno = ENOMEM;
                return -1;
            }
            bytes->data = data;
            bytes->capacity = capacity;
        }
        count = fread(bytes->data + bytes->size, 1, bytes->capacity - bytes->size, file);
        bytes->size += count;
    } while (count > 0 && bytes->size <= MAXIMUM_SIZE);
    if (ferror(file)) {
        const int error = errno;
        fclose(file);
        errno = error;
        return -1;
    }
    fclose(file);
    return 0;
}

static int report_error(const char *path) {
    fprintf(stderr, "demo: cannot read %s: %s\n", path, strerror(errno));
    return -1;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Lists regular files only: symbolic links there name the newest version of a licence a second time. Sorts by strcmp,
// so that the text depends neither on the file system nor on the locale.
static int list_licences(char ***names, size_t *count) {
    DIR *folder = opendir(licences);
    size_t capacity = 0;
    *names = NULL;
    *count = 0;
    if (!folder) {
        fprintf(stderr, "demo: cannot read %s: %s (give a text file instead)\n", licences, strerror(errno));
        return -1;
    }
    for (const struct dirent *entry; (entry = readdir(folder));) {
        const size_t length = sizeof licences + strlen(entry->d_name) + 1;
        struct stat status;
        char *path = malloc(length);
        if (*count == capacity) {
            char **more = realloc(*names, (capacity = 2 * capacity + 16) * sizeof **names);
            if (more) *names = more;
            if (!more) capacity = *count;
        }
        if (!path || *count == capacity) {
            fprintf(stderr, "demo: out of memory\n");
            free(path);
            closedir(folder);
            return -1;
        }
        snprintf(path, length, "%s/%s", licences, entry->d_name);
        if (lstat(path, &status) == 0 && S_ISREG(status.st_mode))
            (*names)[(*count)++] = path;
        else
            free(path);
    }
    closedir(folder);
    if (*count > 0) qsort(*names, *count, sizeof **names, compare_names);
    return 0;
}

// Appends the licences. A licence that exists under two names is used once: text seen in training must not occur in the
// held-out part.
static int append_licences(struct bytes *bytes, char **names, size_t count, size_t *files) {
    size_t *start = malloc((count + 1) * sizeof *start);
    *files = 0;
    if (!start) {
        errno = ENOMEM;
        return report_error(licences);
    }
    start[0] = 0;
    for (size_t i = 0; i < count; ++i) {
        const size_t old_size = bytes->size;
        int seen = 0;
        if (append_file(bytes, names[i])) {
            const int status = report_error(names[i]);
            free(start);
            return status;
        }
        const size_t size = bytes->size - old_size;
        for (size_t k = 0; k < *files && size > 0 && !seen; ++k)
            seen = start[k + 1] - start[k] == size && !memcmp(bytes->data + start[k], bytes->data + old_size, size);
        if (seen)
            bytes->size = old_size;
        else
            start[++*files] = bytes->size;
    }
    free(start);
    return 0;
}

static int read_licences(struct bytes *bytes, struct text *text) {
    char **names;
    size_t count, files = 0;
    int status = list_licences(&names, &count);
    if (!status) status = append_licences(bytes, names, count, &files);
    for (size_t i = 0; i < count; ++i) free(names[i]);
    free(names);
    snprintf(text->source, sizeof text->source, "%zu licence texts in %s", files, licences);
    return status;
}

static int read_file(struct bytes *bytes, struct text *text, const char *path) {
    snprintf(text->source, sizeof text->source, "%s", path);
    return append_file(bytes, path) ? report_error(path) : 0;
}

int text_load(struct text *text, const char *path) {
    struct bytes bytes = {NULL, 0, 0};
    int symbol_of[256];
    memset(text, 0, sizeof *text);
    if (path ? read_file(&bytes, text, path) : read_licences(&bytes, text)) {
        free(bytes.data);
        return -1;
    }
    if (bytes.size < MINIMUM_SIZE || bytes.size > MAXIMUM_SIZE) {
        fprintf(stderr, "demo: %s ", path ? path : licences);
        if (bytes.size == 0)
            fprintf(stderr, "is empty\n");
        else if (bytes.size > MAXIMUM_SIZE)
            fprintf(stderr, "is too long: more than %d bytes\n", MAXIMUM_SIZE);
        else
            fprintf(stderr, "is too short: %zu bytes, at least %d are needed\n", bytes.size, MINIMUM_SIZE);
        free(bytes.data);
        return -1;
    }
    for (int byte = 0; byte < 256; ++byte) symbol_of[byte] = -1;
    for (size_t i = 0; i < bytes.size; ++i) symbol_of[bytes.data[i]] = 0;
    for (int byte = 0; byte < 256; ++byte) {
        if (symbol_of[byte] < 0) continue;
        text->byte_of[text->vocabulary] = (uint8_t)byte;
        symbol_of[byte] = text->vocabulary++;
    }
    for (size_t i = 0; i < bytes.size; ++i) bytes.data[i] = (uint8_t)symbol_of[bytes.data[i]];
    text->symbols = bytes.data;
    text->size = bytes.size;
    text->train_size = bytes.size - bytes.size / 10;
    return 0;
}

void text_free(struct text *text) {
    free(text->symbols);
    text->symbols = NULL;
}
