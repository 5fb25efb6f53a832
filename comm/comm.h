// SPDX-License-Identifier: Apache-2.0
// Communicators. A provider fills the table of dsopt.h; everything above it uses this class, which counts, checks and
// keeps the first failure.
#pragma once
#include "base/not_copied.h"
#include "device/context.h"
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace dsopt {

/// Where the data of a call are.
enum class Place { host, backend };

/// What a table does not say of its functions.
struct Provider {
    bool of_caller = false; // its functions have codes of their own; the engine's return dsopt_status
    bool enqueues = false;  // they come back before the exchange is done, which is then done in the order of the stream
    /// They pass device memory to a library that does not use CUDA streams: DSOPT_COMM_FLAG_SYNCHRONIZE.
    bool synchronizes = false;
    /// With `enqueues`: waits until the stream is done, no longer than the comm lets it. NULL: as long as it takes.
    int (*wait)(void *self, void *stream) = nullptr;
};

/// Bytes of the largest collectives to come: of an all-reduce, and of a row of the other two.
struct Messages {
    int64_t all_reduce = 0, all_to_all = 0, all_gather = 0;
};

/// The exchanges of a provider, for data anywhere: what is in other memory than the provider works in is staged here,
/// and what the provider lacks is made from what it has. Both happen in this class alone.
class Comm : NotCopied {
public:
    Comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table, Provider provider = {});
    ~Comm();

    const std::shared_ptr<const Context> &context() const { return context_; }
    int rank() const { return table_.rank; }
    int ranks() const { return table_.ranks; }
    bool on_device() const { return device_; }
    // Results on the host are there when these return, others in the order of the stream. Any failure loses the comm:
    // ranks would no longer be at the same call.
    /// In place. With one rank nothing happens.
    void all_reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream, Place place = Place::host);
    /// `send` has ranks() rows of `bytes`, row d goes to rank d; `recv` gets row s from rank s. With one rank a copy.
    void all_to_all(const void *send, void *recv, int64_t bytes, void *stream, Place place = Place::host);
    /// `recv` gets ranks() rows of `bytes`. With one rank a copy.
    void all_gather(const void *send, void *recv, int64_t bytes, void *stream, Place place = Place::host);

    /// Allocates the memory that such collectives work in, so that none of them fails for lack of it. Sends nothing.
    void reserve(const Messages &messages, void *stream, Place place);
    /// Throws DSOPT_ERR_STATE, with nothing done, if `stream` is being captured and an exchange of such memory cannot
    /// be.
    void check_stream(void *stream, Place place) const;
    /// Device memory for what travels together, kept for the next call. There must be enough of it when a stream is
    /// captured.
    float *bucket(int64_t numel, void *stream);
    /// Calls body(). A failure loses the comm: ranks may be at different calls then. Not a refusal to be captured.
    template <class Body> void lose_if_it_fails(const Body &body) {
        try {
            body();
        } catch (const Error &error) {
            if (error.status() != DSOPT_ERR_STATE) lose(error.status());
            throw;
        } catch (const std::bad_alloc &) {
            lose(DSOPT_ERR_NOMEM);
            throw;
        } catch (...) {
            lose(DSOPT_ERR_INTERNAL); // which the call returns
            throw;
        }
    }
    void abort() noexcept;
    dsopt_comm_info info() const;

private:
    /// Memory that the provider works in, kept for the next call.
    class Scratch {
    public:
        bool holds(size_t bytes) const { return bytes <= bytes_; }
        char *get(const std::shared_ptr<const Context> &context, bool device, size_t bytes, void *stream);
        /// Device memory that a lost exchange may still write to is given back to nobody.
        void leave_behind();

    private:
        Memory device_;
        std::vector<Memory> outgrown_;
        HostBuffer pinned_;
        std::vector<char> plain_;
        size_t bytes_ = 0;
    };

    void begin();
    void lose(dsopt_status status) noexcept;
    template <class Call>
    void run(const char *what, const void *send, int64_t sent, void *recv, int64_t received, Place place, void *stream,
             const Call &call);
    /// The result of a function of the table. An exception of a caller's function is a failure.
    template <class Function> int result_of(const Function &function);
    /// The result of a collective of the table, which waits for the stream with DSOPT_COMM_FLAG_SYNCHRONIZE.
    template <class Function> int call_table(void *stream, const Function &function);
    int wait_for_enqueued(void *stream);
    void fail(int result, const char *what, void *stream);
    /// Counts a call, and the bytes that it has sent and received: as many of either.
    int done(int kind, int result, int64_t moved);
    void move(void *to, const void *from, int64_t bytes, Place place, void *stream) const;
    Place provider_place() const { return device_ ? Place::backend : Place::host; }
    // In the provider's memory; 0 or its error.
    int reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream);
    int gather(const void *send, void *recv, int64_t bytes, void *stream);
    int transpose(const void *send, void *recv, int64_t bytes, void *stream);

    std::shared_ptr<const Context> context_;
    dsopt_comm_table table_;
    Provider provider_;
    bool device_; // the provider takes device memory
    Scratch staging_, spare_, gathered_, bucket_;
    std::atomic<dsopt_status> status_{DSOPT_OK};
    char thrown_[160] = ""; // what a function of the caller's table threw, in words
    struct Count {
        std::atomic<int64_t> calls{0}, moved{0};
    };
    Count counts_[DSOPT_COLLECTIVE_SLOTS]; // what the provider was asked for
};

/// Data-parallel ranks: those of `data` in each rank of a node. NULL = one.
inline int64_t data_ranks(const Comm *data, const Comm *node) {
    return int64_t(data != nullptr ? data->ranks() : 1) * (node != nullptr ? node->ranks() : 1);
}

/// Ranks that take a step together; NULL = one rank.
struct CommSet {
    Comm *data, *model;
    const std::shared_ptr<Comm> *experts;
    int32_t expert_count;
    /// With it the data ranks are those of all nodes, and `data` has the ranks of each node that have the same number.
    Comm *node;
};

/// Calls body(). A failure makes all of the comms unusable that have other ranks: those may be at another collective.
void lose_if_it_fails(const CommSet &comms, FunctionRef<void()> body);

/// In place, over all ranks; in fp32, rounded once. The op may be DSOPT_OP_MEAN here.
void all_reduce_list(Comm &comm, const dsopt_tensor *list, int64_t count, int32_t op, void *stream);

/// From a description that read_struct() has read.
std::unique_ptr<Comm> make_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);
/// Size of the blob of a kind, which is written to `id` unless that is NULL.
size_t make_comm_id(int32_t kind, void *id, size_t capacity);

} // namespace dsopt
