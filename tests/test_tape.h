// SPDX-License-Identifier: Apache-2.0
// A checkpoint in memory.
#pragma once
#include "dsopt.h"
#include <cstring>
#include <string>

namespace {

/// Both ends of the callbacks.
struct Tape {
    std::string data;
    int calls = 0, fail_at = -1;
    static int write(void *user, const void *bytes, size_t size) {
        auto *self = static_cast<Tape *>(user);
        if (self->calls++ == self->fail_at) return 4711;
        self->data.append(static_cast<const char *>(bytes), size);
        return 0;
    }
    static int read(void *user, uint64_t offset, void *bytes, size_t size) {
        auto *self = static_cast<Tape *>(user);
        if (self->calls++ == self->fail_at) return -42;
        if (offset > self->data.size() || size > self->data.size() - offset) return 99;
        std::memcpy(bytes, self->data.data() + offset, size);
        return 0;
    }
    dsopt_io io(uint32_t flags = 0) {
        DSOPT_NEW(dsopt_io, io);
        io.flags = flags;
        io.user = this;
        io.write = write;
        io.read = read;
        io.total = data.size();
        return io;
    }
};

} // namespace
