// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process. In a collective each rank publishes the addresses of its data, and no rank
// returns before all ranks have finished. Each element is added up by one rank, in rank order, which writes the result
// to all ranks. So all ranks get the same bits, and no collective allocates memory.
#include "base/fork.h"
#include "comm/bounded.h"
#include "comm/provider.h"
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace dsopt {
namespace {

/// One rank's arguments of a collective; kind and size must be the same on all ranks.
struct Contribution {
    enum Kind : int32_t { reduce, to_all, gather } kind;
    int32_t dtype, op; // of reduce
    int64_t count;     // elements, or bytes for each rank
    const void *data;
    void *result; // of reduce
    bool same_call(const Contribution &other) const {
        return kind == other.kind && dtype == other.dtype && op == other.op && count == other.count;
    }
};

/// Rendezvous of the ranks of a group.
class Rendezvous {
public:
    explicit Rendezvous(int ranks) : ranks_(ranks), contributions_(size_t(ranks)), joined_(size_t(ranks)) {}
    int ranks() const { return ranks_; }

    dsopt_status join(int rank, int timeout_ms) {
        {
            const std::lock_guard lock(mutex_);
            if (joined_[size_t(rank)]) return DSOPT_ERR_ARGUMENT;
            joined_[size_t(rank)] = true;
        }
        return arrive(timeout_ms);
    }
    void leave(int rank) {
        const std::lock_guard lock(mutex_);
        left_rank_ = rank;
        changed_.notify_all();
    }
    void abort() {
        const std::lock_guard lock(mutex_);
        fail(DSOPT_ERR_ABORTED, "aborted");
    }
    void describe(char *text, size_t capacity) {
        const std::lock_guard lock(mutex_);
        copy_text(reason_, text, capacity);
    }

    /// Publishes `contribution`, waits for all ranks, calls read(offers), and waits until all ranks have read.
    template <class Read>
    dsopt_status collect(int rank, const Contribution &contribution, int timeout_ms, const Read &read) {
        {
            const std::lock_guard lock(mutex_);
            contributions_[size_t(rank)] = contribution;
        }
        if (const dsopt_status status = arrive(timeout_ms)) return status;
        for (int other = 0; other < ranks_; ++other)
            if (!contributions_[size_t(other)].same_call(contribution)) {
                const std::lock_guard lock(mutex_);
                fail(DSOPT_ERR_COMM, "ranks " + std::to_string(rank) + " and " + std::to_string(other) +
                                         " called different collectives or sizes");
                return DSOPT_ERR_COMM;
            }
        read(contributions_);
        depart();
        return DSOPT_OK;
    }

private:
    void fail(dsopt_status status, std::string reason) { // with the lock held
        if (failed_ != DSOPT_OK) return;
        failed_ = status;
        reason_ = std::move(reason);
        changed_.notify_all();
    }

    /// Returns true on the last rank to arrive, which releases the others. Called with the lock held.
    bool ends_round() {
        if (++arrived_ != ranks_) return false;
        arrived_ = 0;
        ++round_;
        changed_.notify_all();
        return true;
    }

    dsopt_status arrive(int timeout_ms) {
        std::unique_lock lock(mutex_);
        if (failed_ != DSOPT_OK) return failed_;
        const int64_t round = round_;
        if (ends_round()) return DSOPT_OK;
        if (!Deadline(timeout_ms).wait(changed_, lock, [&] {
                return round_ != round || failed_ != DSOPT_OK || left_rank_ >= 0;
            }))
            fail(DSOPT_ERR_TIMEOUT, ranks_are_missing(ranks_, timeout_ms));
        if (round_ != round) return DSOPT_OK; // all arrived, whatever happened later
        if (failed_ == DSOPT_OK) fail(DSOPT_ERR_COMM, "rank " + std::to_string(left_rank_) + " has left");
        return failed_;
    }

    /// The published memory may be freed when a rank returns. So no rank returns while another rank reads, not even
    /// after an abort or a time-out. All ranks have arrived and reading does not block, so this wait is short.
    void depart() {
        std::unique_lock lock(mutex_);
        const int64_t round = round_;
        if (!ends_round()) changed_.wait(lock, [&] { return round_ != round; });
    }

    const int ranks_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Contribution> contributions_;
    std::vector<bool> joined_;
    int arrived_ = 0;
    int left_rank_ = -1; // a rank that has left the group; -1: none
    int64_t round_ = 0;
    dsopt_status failed_ = DSOPT_OK;
    std::string reason_;
};

/// Returns the rendezvous of an id. Ranks keep it alive, so the map never has more entries than there are live groups.
std::shared_ptr<Rendezvous> find_rendezvous(const std::string &id, int ranks) {
    static constinit PerProcess<std::map<std::string, std::weak_ptr<Rendezvous>>> all_groups;
    const auto rendezvous = all_groups.with([&](auto &groups) {
        std::erase_if(groups, [](const auto &item) { return item.second.expired(); });
        std::weak_ptr<Rendezvous> &entry = groups[id];
        std::shared_ptr<Rendezvous> found = entry.lock();
        if (!found) entry = found = std::make_shared<Rendezvous>(ranks);
        return found;
    });
    if (rendezvous->ranks() != ranks)
        throw Error(DSOPT_ERR_COMM, "a rank says %d ranks, another one %d", ranks, rendezvous->ranks());
    return rendezvous;
}

/// Endpoint of one rank, which has joined the rendezvous.
class LocalEndpoint : NotCopied {
public:
    LocalEndpoint(std::shared_ptr<Rendezvous> rendezvous, int rank, int timeout_ms) :
        rendezvous_(std::move(rendezvous)),
        rank_(rank),
        timeout_ms_(timeout_ms) {}
    ~LocalEndpoint() { rendezvous_->leave(rank_); }

    dsopt_status all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) const {
        const Contribution local{Contribution::reduce, dtype, op, count, send, recv};
        switch (dtype) {
        case DSOPT_DTYPE_F32: return reduce<float>(local);
        case DSOPT_DTYPE_F64: return reduce<double>(local);
        case DSOPT_DTYPE_I32: return reduce<int32_t>(local);
        default: return DSOPT_ERR_DTYPE;
        }
    }
    bool has_all_to_all() const { return true; }
    dsopt_status all_to_all(const void *send, void *recv, int64_t bytes, void *) const {
        return gather_messages({Contribution::to_all, 0, 0, bytes, send, nullptr}, rank_ * bytes, recv);
    }
    dsopt_status all_gather(const void *send, void *recv, int64_t bytes, void *) const {
        return gather_messages({Contribution::gather, 0, 0, bytes, send, nullptr}, 0, recv);
    }
    bool has_reduce_scatter() const { return false; } // the engine adds in the same order
    dsopt_status reduce_scatter(const void *, void *, int64_t, int32_t, int32_t, void *) const {
        return DSOPT_ERR_UNSUPPORTED;
    }
    void describe(char *text, size_t capacity) const { rendezvous_->describe(text, capacity); }
    void abort() const { rendezvous_->abort(); }

private:
    /// Reduces this rank's slice block by block and writes the result to every rank. No other rank accesses that slice.
    template <class T> dsopt_status reduce(const Contribution &local) const {
        return rendezvous_->collect(rank_, local, timeout_ms_, [&](const auto &contributions) {
            const auto ranks = int64_t(contributions.size());
            const int64_t end = local.count / ranks * (rank_ + 1) + local.count % ranks * (rank_ + 1) / ranks;
            int64_t begin = local.count / ranks * rank_ + local.count % ranks * rank_ / ranks;
            T block[1024];
            for (int64_t n = 0; begin < end; begin += n) {
                n = std::min<int64_t>(end - begin, std::size(block));
                std::copy_n(static_cast<const T *>(contributions[0].data) + begin, n, block);
                for (size_t rank = 1; rank < contributions.size(); ++rank)
                    reduce_into(block, static_cast<const T *>(contributions[rank].data) + begin, n, local.op);
                for (const Contribution &contribution : contributions)
                    std::copy_n(block, n, static_cast<T *>(contribution.result) + begin);
            }
        });
    }
    /// Copies one message from every rank, which is at `offset` of the rank's data.
    dsopt_status gather_messages(const Contribution &local, int64_t offset, void *recv) const {
        const auto bytes = size_t(local.count);
        return rendezvous_->collect(rank_, local, timeout_ms_, [&](const auto &contributions) {
            char *to = static_cast<char *>(recv);
            for (const Contribution &contribution : contributions) {
                std::memcpy(to, static_cast<const char *>(contribution.data) + offset, bytes);
                to += bytes;
            }
        });
    }

    const std::shared_ptr<Rendezvous> rendezvous_;
    const int rank_, timeout_ms_;
};

} // namespace

void make_local_id(void *id) {
    static std::atomic<uint64_t> next{1};
    const uint64_t words[2] = {0x4c4f43414c2d4453ull, next.fetch_add(1)};
    static_assert(sizeof words == kLocalIdBytes);
    std::memcpy(id, words, sizeof words);
}

std::unique_ptr<Comm> make_local_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    const int timeout_ms = timeout_of(desc);
    const std::string id(static_cast<const char *>(desc.id), desc.id_bytes);
    const auto rendezvous = find_rendezvous(id, desc.ranks);
    const dsopt_status status = rendezvous->join(desc.rank, timeout_ms);
    if (status == DSOPT_ERR_ARGUMENT) throw Error(status, "rank %d of this id exists already", desc.rank);
    if (status != DSOPT_OK) throw Error(status, "%s", ranks_are_missing(desc.ranks, timeout_ms).c_str());
    dsopt_comm_table table{};
    table.rank = desc.rank;
    table.ranks = desc.ranks;
    table.memory = DSOPT_MEMORY_HOST;
    return make_comm_from_endpoint(std::move(context),
                                   std::make_unique<LocalEndpoint>(rendezvous, desc.rank, timeout_ms), table);
}

} // namespace dsopt
