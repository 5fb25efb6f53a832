// SPDX-License-Identifier: Apache-2.0
// Communicators. A provider fills the table of dsopt.h; everything above it uses this class, which counts, checks and
// keeps the first failure.
#pragma once
#include "context.h"
#include <atomic>
#include <memory>
#include <mutex>

namespace dsopt {

class Comm {
public:
    /// `returns_status`: the table's functions return dsopt_status and the last error text is set.
    Comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table, bool returns_status);
    ~Comm();
    Comm(const Comm &) = delete;
    Comm &operator=(const Comm &) = delete;

    const std::shared_ptr<const Context> &context() const { return context_; }
    int rank() const { return table_.rank; }
    int ranks() const { return table_.ranks; }
    /// True if it can do what 1-bit compression needs.
    bool exchanges() const { return ranks() == 1 || (table_.all_to_all != nullptr && table_.all_gather != nullptr); }
    /// In place. With one rank nothing happens.
    void all_reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream);
    /// `send` has ranks() rows of `bytes`, row d goes to rank d; `recv` gets row s from rank s. With one rank a copy.
    void all_to_all(const void *send, void *recv, int64_t bytes, void *stream);
    /// `recv` gets ranks() rows of `bytes`.
    void all_gather(const void *send, void *recv, int64_t bytes, void *stream);
    void broadcast(void *buffer, int64_t bytes, int root, void *stream);
    void barrier();

    void abort() noexcept;
    dsopt_comm_info info() const;

private:
    void begin();
    void check(int result, const char *what, int64_t sent, int64_t received);

    std::shared_ptr<const Context> context_;
    dsopt_comm_table table_;
    bool returns_status_;
    std::atomic<dsopt_status> status_{DSOPT_OK};
    std::atomic<int64_t> calls_{0}, sent_{0}, received_{0};
};

/// Providers, in comm/.
std::unique_ptr<Comm> make_self_comm(std::shared_ptr<const Context> context);
std::unique_ptr<Comm> make_table_comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table);
std::unique_ptr<Comm> make_local_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);
constexpr size_t kLocalIdBytes = 16;
void make_local_id(void *id);

std::unique_ptr<Comm> make_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);

} // namespace dsopt
