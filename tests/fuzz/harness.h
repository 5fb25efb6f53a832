// SPDX-License-Identifier: Apache-2.0
// Shared by the fuzz targets: bytes as choices, checks of properties, and counts of calls by status.
#pragma once
#include "support/handles.h"
#include <algorithm>
#include <array>
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

/// Reports a property that does not hold, with the engine's last error, and aborts, so that the input is kept.
[[noreturn, gnu::format(printf, 1, 2)]] void finding(const char *format, ...);

/// Counts the call. DSOPT_ERR_INTERNAL is a finding, and so is an error text longer than documented.
dsopt_status counted(const char *call, dsopt_status status);
/// Same for a call that must not fail.
void must(const char *call, dsopt_status status);
/// Prints the counts when the program ends.
void count_runs();
/// Describes the calls since the last call of this function: their number, those that failed by status, and the text of
/// the error if one failed.
std::string outcome();

/// Reads the bytes of an input sequentially as choices. After the end all choices are 0.
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
    /// True for one in n values of a byte; false after the end.
    bool rarely(int n) { return left_ != 0 && byte() % n == n - 1; }
    template <class T, size_t N> T of(const T (&list)[N]) { return list[byte() % N]; }

private:
    const uint8_t *next_;
    size_t left_;
};

/// State of a data comm of one rank, in which all other ranks send the data of this rank. Must outlive the comm.
struct Echo {
    int rank = 0, ranks = 1;
};
dsopt_comm_table echo_table(Echo &echo);
test::Comm echo_comm(const test::Context &context, Echo &echo);

size_t size_of(int32_t dtype);

/// Formats of moments, enum dsopt_moment.
struct Formats {
    int32_t first = DSOPT_MOMENT_F32, second = DSOPT_MOMENT_F32;
    bool are_f32() const { return first == DSOPT_MOMENT_F32 && second == DSOPT_MOMENT_F32; }
};
constexpr int kFormatChoices = 15;
/// Returns one of the kFormatChoices pairs of formats, or the closest one that the algorithm has. SGD must have
/// momentum.
Formats formats_of(int32_t algorithm, int choice);

/// Returns an algorithm of the list, or Muon for the last values of a byte: inputs that are older than Muon keep their
/// meaning.
constexpr uint8_t kFirstOfMuon = 242;
template <size_t N> int32_t algorithm_of(uint8_t byte, const int32_t (&list)[N]) {
    return byte >= kFirstOfMuon ? int32_t(DSOPT_ALGORITHM_MUON) : list[byte % N];
}

/// The shape of a parameter of Muon, and its small matrix blocks. By default a flat parameter of other
/// algorithms.
struct Cut {
    std::array<int64_t, 3> dims{};
    int32_t ndim = 0, flags = 0;
    int64_t rows = 0, cols = 0, numel = 0;
    /// Sets everything except the tensor. The dims are not copied.
    void describe(dsopt_param &param) const;
};
/// Chooses a valid one.
Cut cut_of(Choices &choose);
/// Chooses valid values of the fields that only Muon has, of its flags and of its momentum.
void choose_iterations(Choices &choose, dsopt_group &group);

/// Callbacks of dsopt_io that write to and read from a string.
int append(void *file, const void *data, size_t bytes);
int read_at(void *file, uint64_t offset, void *data, size_t bytes);

} // namespace fuzz
