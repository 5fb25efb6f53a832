// SPDX-License-Identifier: Apache-2.0
// Communicators. A provider fills the function table of dsopt.h. All other code uses class Comm, which counts calls,
// checks them and keeps the first failure.
#pragma once
#include "base/not_copied.h"
#include "device/context.h"
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace dsopt {

/// Memory that holds the data of a call.
enum class Place { host, backend };

/// Properties of a table's functions that are not in the table.
struct Provider {
    bool of_caller = false; // the functions are the caller's and return its codes; the engine's return dsopt_status
    bool enqueues = false;  // the functions return before the exchange is complete; it completes in stream order
    /// The functions pass device memory to a library that does not use CUDA streams: DSOPT_COMM_FLAG_SYNCHRONIZE.
    bool synchronizes = false;
    bool sums = false;      // DSOPT_COMM_FLAG_PROVIDER_SUMS
    bool any_thread = true; // DSOPT_COMM_FLAG_ANY_THREAD
    /// With `enqueues`: waits until the stream is done, at most for the comm's time-out. NULL: waits without a limit.
    int (*wait)(void *self, void *stream) = nullptr;
};

/// Sizes in bytes of the largest collectives to come: the whole all-reduce, and one message of the other two.
struct Messages {
    int64_t all_reduce = 0, all_to_all = 0, all_gather = 0;
};

/// Marks the calls of this thread as those of a user, for Comm::hold().
class CommUser : NotCopied {
public:
    explicit CommUser(const void *user) : before_(current_) { current_ = user; }
    ~CommUser() { current_ = before_; }
    static const void *current() { return current_; }

private:
    static inline thread_local const void *current_ = nullptr;
    const void *const before_;
};

/// Collectives of a provider, for data in any memory. Only this class stages data that are not in the provider's
/// memory, and composes collectives that the provider lacks from other collectives.
class Comm : NotCopied {
public:
    Comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table, Provider provider = {});
    ~Comm();

    const std::shared_ptr<const Context> &context() const { return context_; }
    int rank() const { return table_.rank; }
    int ranks() const { return table_.ranks; }
    bool on_device() const { return device_; }
    /// True if means are added up by reduce_scatter().
    bool provider_sums() const { return provider_.sums && ranks() > 1; }
    // Results on the host are complete when these functions return, results on the device in stream order. Any failure
    // makes the comm unusable, because ranks could then be at different calls.
    /// Reduces in place. Does nothing with one rank.
    void all_reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream, Place place = Place::host);
    /// `send` has ranks() messages of `bytes` each; message d goes to rank d. `recv` receives message s from rank s.
    /// Copies if there is one rank.
    void all_to_all(const void *send, void *recv, int64_t bytes, void *stream, Place place = Place::host);
    /// `recv` receives ranks() messages of `bytes` each. Copies if there is one rank.
    void all_gather(const void *send, void *recv, int64_t bytes, void *stream, Place place = Place::host);

    /// `send` has ranks() rows of `count` floats; `recv` receives the sum of this rank's row, in the provider's order.
    void reduce_scatter(const void *send, void *recv, int64_t count, void *stream, Place place);

    /// Allocates the memory that collectives of these sizes need, so that none of them fails for lack of memory. Sends
    /// nothing.
    void reserve(const Messages &messages, void *stream, Place place);
    /// Throws DSOPT_ERR_STATE, before any work, if `stream` is being captured and collectives on data in memory of kind
    /// `place` cannot be captured.
    void check_stream(void *stream, Place place) const;
    /// Returns device memory for tensors that are reduced together; it is kept for the next call. During a capture, the
    /// memory of an earlier call must be large enough.
    float *bucket(int64_t numel, void *stream);
    /// Calls body(). A failure makes the comm unusable, because ranks may then be at different calls. DSOPT_ERR_STATE
    /// (the stream is being captured) and _BUSY (see hold()) do not: nothing was sent.
    template <class Body> void unusable_on_failure(const Body &body) {
        try {
            body();
        } catch (const Error &error) {
            const bool sent_nothing = error.status() == DSOPT_ERR_STATE || error.status() == DSOPT_ERR_BUSY;
            if (!sent_nothing) set_unusable(error.status());
            throw;
        } catch (const std::bad_alloc &) {
            set_unusable(DSOPT_ERR_NOMEM);
            throw;
        } catch (...) {
            set_unusable(DSOPT_ERR_INTERNAL); // the status that the call returns
            throw;
        }
    }
    void abort() noexcept;
    dsopt_comm_info info() const;

    /// Refuses the collectives of others than `user` with BUSY until release(). Throws BUSY if it is held: all ranks
    /// make the same calls, so all of them get BUSY, in place of collectives in different orders.
    void hold(const void *user);
    void release(const void *user) noexcept;
    /// True if collectives may be called by a thread of the library.
    bool any_thread() const { return provider_.any_thread; }

private:
    /// Memory of the provider's kind, kept for the next call.
    class Scratch {
    public:
        bool holds(size_t bytes) const { return bytes <= bytes_; }
        char *get(const std::shared_ptr<const Context> &context, bool device, size_t bytes, void *stream);
        /// Keeps device memory to which a failed exchange may still write until the process ends.
        void leak();

    private:
        Memory device_;
        std::vector<Memory> outgrown_;
        HostBuffer pinned_;
        std::vector<char> plain_;
        size_t bytes_ = 0;
    };

    void check_usable();
    void check_not_held() const;
    [[noreturn]] static void throw_held();
    void set_unusable(dsopt_status status) noexcept;
    template <class Call>
    void run(const char *what, const void *send, int64_t sent, void *recv, int64_t received, Place place, void *stream,
             const Call &call);
    /// Returns the result of a function of the table. An exception of a caller's function is a failure.
    template <class Function> int result_of(const Function &function);
    /// Returns the result of a collective of the table. Waits for the stream first with DSOPT_COMM_FLAG_SYNCHRONIZE.
    template <class Function> int call_table(void *stream, const Function &function);
    int wait_for_enqueued(void *stream);
    void fail(int result, const char *what, void *stream);
    /// Counts a call and the bytes moved: the numbers of sent and received bytes are equal. Returns `result`.
    int count_call(int kind, int result, int64_t moved);
    void move(void *to, const void *from, int64_t bytes, Place place, void *stream) const;
    Place provider_place() const { return device_ ? Place::backend : Place::host; }
    // Work on data in the provider's memory; these return 0 or the provider's error.
    int reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream);
    int gather(const void *send, void *recv, int64_t bytes, void *stream);
    int exchange_messages(const void *send, void *recv, int64_t bytes, void *stream);

    std::shared_ptr<const Context> context_;
    dsopt_comm_table table_;
    Provider provider_;
    bool device_; // the provider works in device memory
    Scratch staging_, spare_, gathered_, bucket_;
    std::atomic<dsopt_status> status_{DSOPT_OK};
    std::atomic<const void *> holder_{nullptr};
    char thrown_[160] = ""; // text of the exception that a function of the caller's table threw
    struct Count {
        std::atomic<int64_t> calls{0}, moved{0};
    };
    Count counts_[DSOPT_COLLECTIVE_SLOTS]; // calls to the provider
};

/// Number of data-parallel ranks: ranks of `data` times ranks per node. A NULL comm counts as one rank.
inline int64_t data_ranks(const Comm *data, const Comm *node) {
    return int64_t(data != nullptr ? data->ranks() : 1) * (node != nullptr ? node->ranks() : 1);
}

/// Comms of the ranks that take a step together; a NULL comm is one rank.
struct CommSet {
    Comm *data, *model;
    const std::shared_ptr<Comm> *experts;
    int32_t expert_count;
    /// If set, the data-parallel ranks are the ranks of all nodes, and `data` connects the ranks with the same index in
    /// their nodes.
    Comm *node;
    /// Returns the ranks that matrices are partitioned among, those of a node, so that nothing is sent between nodes;
    /// NULL: one rank.
    Comm *matrices() const { return node != nullptr ? node : data; }
};

/// Calls body(). A failure makes all comms with more than one rank unusable, because their ranks may be at different
/// collectives.
void unusable_on_failure(const CommSet &comms, FunctionRef<void()> body);

/// Reduces in place over all ranks, in fp32, rounded once. `op` may be DSOPT_OP_MEAN here.
void all_reduce_list(Comm &comm, const dsopt_tensor *list, int64_t count, int32_t op, void *stream);

/// Creates a comm from a description that read_struct() has checked.
std::unique_ptr<Comm> make_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);
/// Returns the size of an id of this kind, and writes an id to `id` unless `id` is NULL.
size_t make_comm_id(int32_t kind, void *id, size_t capacity);

} // namespace dsopt
