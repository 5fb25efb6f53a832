// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agreement.h"
#include "base/text.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dsopt {
namespace {

uint64_t hash_of(const std::string &text, uint64_t seed) {
    return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

/// Words whose maxima are x and ~x: all ranks have the same x if these are complements.
struct Both {
    uint32_t high = 0, inverse = 0;
    void set(uint32_t word) { high = word, inverse = ~word; }
    bool same() const { return high == ~inverse; }
};
/// Exchanged as signed words, of which ranks take the maximum.
struct Message {
    int32_t failed = 0; // rank + 1 of a rank that failed, 0 = none
    Both point, alike[2];
    int32_t most = 0; // entries of Alike
    AgreedWords high{}, inverse{};
};
static_assert(sizeof(Message) == sizeof(int32_t) * (2 + 2 * 3 + 2 * std::tuple_size_v<AgreedWords>));

} // namespace

void Alike::add(std::string name, std::string text) {
    const uint64_t key = hash_of(text, hash_of(name, 1));
    hash_ = XXH3_64bits_withSeed(&key, sizeof key, hash_);
    entries_.push_back({std::move(name), std::move(text), key});
}
void Alike::add(std::string name, const void *data, size_t bytes) {
    const uint64_t contents = XXH3_64bits(data, bytes);
    const uint64_t key = XXH3_64bits_withSeed(&contents, sizeof contents, hash_of(name, 2));
    hash_ = XXH3_64bits_withSeed(&key, sizeof key, hash_);
    entries_.push_back({std::move(name), {}, key});
}
std::string Alike::describe(size_t i) const {
    if (i >= entries_.size()) return "an entry that this rank does not have";
    const Entry &entry = entries_[i];
    return quoted(entry.name) + (entry.text.empty() ? "" : ", which is " + quoted(entry.text) + " on this rank");
}

bool Agreement::reach(AgreedWords &words, const Alike &alike) {
    reached_ = true;
    if (!optimizer_.shards()) return true;
    Message message;
    message.most = int32_t(alike.size());
    message.high = message.inverse = words;
    for (int32_t &word : message.inverse) word = ~word;
    message.point.set(uint32_t(point_));
    message.alike[0].set(uint32_t(alike.hash()));
    message.alike[1].set(uint32_t(alike.hash() >> 32));
    try {
        max_over_ranks(optimizer_, &message, sizeof message, nullptr);
    } catch (const Error &error) {
        throw Error(error.status(), "%s; with sharded state all ranks call %s together", error.what(), function_);
    }
    if (message.failed != 0) throw Error(DSOPT_ERR_MISMATCH, "rank %d %s", message.failed - 1, failed_);
    if (!message.point.same())
        throw Error(DSOPT_ERR_MISMATCH,
                    "another rank is in another call: with sharded state all ranks call %s together", function_);
    if (!message.alike[0].same() || !message.alike[1].same()) {
        const int64_t i = first_different(
            optimizer_, size_t(message.most), [&](size_t k) { return alike.key(k); }, nullptr);
        throw Error(DSOPT_ERR_MISMATCH, "%s: ranks differ in %s", function_,
                    alike.describe(i < 0 ? alike.size() : size_t(i)).c_str());
    }
    words = message.high;
    bool same = true;
    for (size_t i = 0; i < words.size(); ++i) same = same && message.high[i] == ~message.inverse[i];
    return same;
}

void Agreement::report_failure() noexcept {
    reached_ = true;
    if (!optimizer_.shards()) return;
    try {
        Message message;
        message.failed = optimizer_.data_rank().rank + 1;
        max_over_ranks(optimizer_, &message, sizeof message, nullptr);
    } catch (const std::exception &) { // ignored: the call returns the error that it failed with
    }
}

} // namespace dsopt
