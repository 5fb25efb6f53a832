// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: bytes as choices, properties that must hold, and what calls came to.
#pragma once
#include "support/handles.h"
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);
}

namespace fuzz {

using Bytes = std::string;

/// A property does not hold: says so, with the engine's own text, and aborts, so that the input is kept.
[[noreturn, gnu::format(printf, 1, 2)]] void finding(const char *format, ...);

/// Counts the call. DSOPT_ERR_INTERNAL is a finding, and so is a text that is longer than promised.
dsopt_status counted(const char *call, dsopt_status status);
/// The same of a call that must not fail.
void must(const char *call, dsopt_status status);
/// Written when the program ends.
void count_runs();

/// The bytes of an input, one choice after the other. Behind their end all choices are 0.
class Choices {
public:
    Choices(const uint8_t *data, size_t size) : next_(data), left_(size) {}
    bool are_left() const { return left_ != 0; }
    uint8_t byte() {
        if (left_ == 0) return 0;
        --left_;
        return *next_++;
    }
    int below(int n) { return byte() % n; }
    bool flip() { return byte() % 2 != 0; }
    /// Once in n, of inputs that mean it; never behind the end.
    bool rarely(int n) { return left_ != 0 && byte() % n == n - 1; }
    template <class T, size_t N> T of(const T (&list)[N]) { return list[byte() % N]; }

private:
    const uint8_t *next_;
    size_t left_;
};

/// A data comm of one rank among several, of which the others say what it says. Lives until the comm does.
struct Echo {
    int rank = 0, ranks = 1;
};
dsopt_comm_table echo_table(Echo &echo);
test::Comm echo_comm(const test::Context &context, Echo &echo);

size_t size_of(int32_t dtype);

/// To and from a string through the callbacks of dsopt_io.
int append(void *file, const void *data, size_t bytes);
int read_at(void *file, uint64_t offset, void *data, size_t bytes);

} // namespace fuzz
