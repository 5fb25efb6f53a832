// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agreement.h"

namespace dsopt {
namespace {

struct Message {
    int32_t failed = 0; // rank + 1 of a rank that failed, 0 = none
    AgreedWords high, inverse;
};
static_assert(sizeof(Message) == sizeof(int32_t) * (1 + 2 * std::tuple_size_v<AgreedWords>));

} // namespace

bool Agreement::reach(AgreedWords &words) {
    reached_ = true;
    if (!optimizer_.shards()) return true;
    Message message{0, words, words};
    for (int32_t &word : message.inverse) word = ~word;
    try {
        max_over_ranks(optimizer_, &message, sizeof message, nullptr);
    } catch (const Error &error) {
        throw Error(error.status(), "%s; with sharded state all ranks call %s together", error.what(), function_);
    }
    if (message.failed != 0) throw Error(DSOPT_ERR_MISMATCH, "rank %d %s", message.failed - 1, failed_);
    words = message.high;
    bool same = true;
    for (size_t i = 0; i < words.size(); ++i) same = same && message.high[i] == ~message.inverse[i];
    return same;
}

void Agreement::report_failure() noexcept {
    reached_ = true;
    if (!optimizer_.shards()) return;
    try {
        Message message{optimizer_.data_rank().rank + 1, {}, {}};
        max_over_ranks(optimizer_, &message, sizeof message, nullptr);
    } catch (const std::exception &) { // ignored: the call returns the error that it failed with
    }
}

} // namespace dsopt
