// SPDX-License-Identifier: Apache-2.0
#include "harness.h"
#include "support/numbers.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace fuzz {
namespace {

constexpr size_t kMaxText = 1023;

struct Statistics {
    std::mutex mutex; // ranks are threads
    long runs = 0;
    std::map<const char *, std::map<dsopt_status, long>> calls;
    // For outcome():
    long recent = 0;
    std::map<dsopt_status, long> recent_failures;
    std::string recent_text;
};
Statistics &statistics() {
    static auto *const all = new Statistics; // threads may outlive static destructors
    return *all;
}
void write_statistics() {
    std::map<dsopt_status, long> sums;
    std::fprintf(stderr, "%ld inputs\n", statistics().runs);
    // By string: literals of one name may have several addresses.
    std::map<std::string, std::map<dsopt_status, long>> calls;
    for (const auto &[call, by_status] : statistics().calls)
        for (const auto &[status, count] : by_status) calls[call][status] += count;
    for (const auto &[call, by_status] : calls) {
        std::fprintf(stderr, "  %-26s", call.c_str());
        for (const auto &[status, count] : by_status) {
            std::fprintf(stderr, " %s %ld", dsopt_status_name(status), count);
            sums[status] += count;
        }
        std::fprintf(stderr, "\n");
    }
    std::fprintf(stderr, "  %-26s", "all calls");
    for (const auto &[status, count] : sums) std::fprintf(stderr, " %s %ld", dsopt_status_name(status), count);
    std::fprintf(stderr, "\n");
}

} // namespace

void finding(const char *format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "FINDING: ");
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "; last error: %s\n", dsopt_last_error());
    std::abort();
}

dsopt_status counted(const char *call, dsopt_status status) {
    {
        Statistics &all = statistics();
        const std::lock_guard lock(all.mutex);
        ++all.calls[call][status];
        ++all.recent;
        if (status != DSOPT_OK) {
            ++all.recent_failures[status];
            all.recent_text = dsopt_last_error();
        }
    }
    if (status == DSOPT_ERR_INTERNAL) finding("%s: DSOPT_ERR_INTERNAL", call);
    if (status != DSOPT_OK && dsopt_last_error()[0] == 0)
        finding("%s: %s has no error text", call, dsopt_status_name(status));
    if (std::strlen(dsopt_last_error()) > kMaxText) finding("%s: the error text is too long", call);
    return status;
}
void must(const char *call, dsopt_status status) {
    if (counted(call, status) != DSOPT_OK) finding("%s: %s", call, dsopt_status_name(status));
}
std::string outcome() {
    Statistics &all = statistics();
    std::string text = std::to_string(all.recent) + (all.recent == 1 ? " call" : " calls");
    long failures = 0;
    for (const auto &[status, count] : all.recent_failures) {
        text += (failures == 0 ? ": " : ", ") + std::to_string(count) + " " + dsopt_status_name(status);
        failures += count;
    }
    if (failures == 1) text += ", " + all.recent_text;
    all.recent = 0;
    all.recent_failures.clear();
    return text;
}
void count_runs() {
    if (statistics().runs++ == 0) (void)std::atexit(write_statistics);
}

namespace {
int all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
    if (send != recv) std::memmove(recv, send, size_t(count) * size_of(dtype));
    const int ranks = static_cast<Echo *>(self)->ranks;
    for (int64_t i = 0; op == DSOPT_OP_SUM && i < count; ++i) {
        if (dtype == DSOPT_DTYPE_F32)
            static_cast<float *>(recv)[i] *= float(ranks);
        else if (dtype == DSOPT_DTYPE_F64)
            static_cast<double *>(recv)[i] *= ranks;
        else
            static_cast<uint32_t *>(recv)[i] *= uint32_t(ranks);
    }
    return 0;
}
int all_to_all(void *self, const void *send, void *recv, int64_t bytes, void *) {
    const Echo &echo = *static_cast<Echo *>(self);
    for (int rank = 0; rank < echo.ranks; ++rank)
        std::memcpy(static_cast<char *>(recv) + rank * bytes, static_cast<const char *>(send) + echo.rank * bytes,
                    size_t(bytes));
    return 0;
}
int all_gather(void *self, const void *send, void *recv, int64_t bytes, void *) {
    const Bytes sent(static_cast<const char *>(send), size_t(bytes)); // `recv` may be the same memory as `send`
    for (int rank = 0; rank < static_cast<Echo *>(self)->ranks; ++rank)
        std::memcpy(static_cast<char *>(recv) + rank * bytes, sent.data(), size_t(bytes));
    return 0;
}
} // namespace

dsopt_comm_table echo_table(Echo &echo) {
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &echo;
    table.rank = echo.rank;
    table.ranks = echo.ranks;
    table.all_reduce = all_reduce;
    table.all_to_all = all_to_all;
    table.all_gather = all_gather;
    return table;
}
test::Comm echo_comm(const test::Context &context, Echo &echo) {
    const dsopt_comm_table table = echo_table(echo);
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    return test::make_comm(context, desc);
}

size_t size_of(int32_t dtype) { return test::size_of(dtype); }

Formats formats_of(int32_t algorithm, int choice) {
    constexpr int32_t squares[] = {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_Q8};
    Formats formats{choice % 5, squares[choice / 5 % 3]};
    if (algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM) return {};
    if (algorithm == DSOPT_ALGORITHM_MUON) return {choice % 3, DSOPT_MOMENT_F32};
    if (algorithm == DSOPT_ALGORITHM_SGD || algorithm == DSOPT_ALGORITHM_LION) formats.second = DSOPT_MOMENT_F32;
    if (algorithm == DSOPT_ALGORITHM_ADAGRAD) {
        formats.first = DSOPT_MOMENT_F32;
        if (formats.second == DSOPT_MOMENT_Q8) formats.second = DSOPT_MOMENT_BF16_RANDOM;
    }
    return formats;
}

void Cut::describe(dsopt_param &param) const {
    param.dims = ndim != 0 ? dims.data() : nullptr;
    param.ndim = ndim;
    param.flags |= flags;
    param.rows = rows;
    param.cols = cols;
}
Cut cut_of(Choices &choose) {
    constexpr int64_t sides[] = {1, 2, 3, 7, 8, 15, 16, 17, 20, 24}; // products of 16-bit dtypes begin at 16
    const uint8_t byte = choose.byte();
    const int64_t count = byte / 4 % 4, rows = choose.of(sides), cols = choose.of(sides);
    Cut cut;
    cut.rows = rows;
    cut.cols = cols;
    cut.numel = count * rows * cols;
    switch (byte % 4) {
    case 0: // one matrix
        cut.dims = {count == 0 ? 0 : rows, cols};
        cut.ndim = 2;
        cut.rows = cut.cols = 0;
        cut.numel = cut.dims[0] * cols;
        break;
    case 1: // a stack
        cut.dims = {count, rows, cols};
        cut.ndim = 3;
        break;
    case 2: // columns
        cut.dims = {rows, count * cols};
        cut.ndim = 2;
        break;
    case 3: break; // flat
    }
    if (byte / 16 % 4 == 3) cut.flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
    return cut;
}
void choose_iterations(Choices &choose, dsopt_group &group) {
    constexpr int32_t dtypes[] = {DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16, DSOPT_DTYPE_F32},
                      flags[] = {DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION, DSOPT_GROUP_NESTEROV,
                                 DSOPT_GROUP_NO_BIAS_CORRECTION};
    const uint8_t fields = choose.byte(), others = choose.byte();
    group.ns_dtype = dtypes[fields % 3];
    group.ns_schedule = fields / 3 % 3;
    group.adjust = fields / 9 % 4;
    group.flags = flags[others % 3];
    group.ns_steps = 1 + others / 3 % 8;
    if (others / 24 % 2 != 0) group.momentum = 0.5;
    if (others / 48 % 2 != 0) group.ns_a = 2, group.ns_b = -1.5, group.ns_c = 0.5;
    if (group.ns_schedule != DSOPT_NS_CONSTANT) group.ns_a = group.ns_b = group.ns_c = 0;
}

int append(void *file, const void *data, size_t bytes) {
    static_cast<Bytes *>(file)->append(static_cast<const char *>(data), bytes);
    return 0;
}
int read_at(void *file, uint64_t offset, void *data, size_t bytes) {
    const Bytes &all = *static_cast<Bytes *>(file);
    if (offset > all.size() || bytes > all.size() - offset) return 5;
    std::memcpy(data, all.data() + offset, bytes);
    return 0;
}

} // namespace fuzz
