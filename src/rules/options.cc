// SPDX-License-Identifier: Apache-2.0
#include "rules/options.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace dsopt {

const OptionRule *first_refusal(At at, const Facts &facts) {
    for (const OptionRule &rule : kOptionRules)
        if (rule.at == at && rule.refuses(facts)) return &rule;
    return nullptr;
}

void throw_refusal(At at, const Facts &facts, const OptionWords &words) {
    const OptionRule *const rule = first_refusal(at, facts);
    char number[24], text[600]; // longer than the text of an Error, which truncates whole characters
    std::snprintf(number, sizeof number, "%lld", ll(words.number));
    const struct Word {
        const char *word, *value;
    } known[] = {{"{name}", words.name}, {"{algorithm}", words.algorithm}, {"{number}", number}};
    size_t length = 0;
    const auto append = [&](const char *from, size_t count) {
        count = std::min(count, sizeof text - 1 - length);
        std::memcpy(text + length, from, count);
        length += count;
    };
    for (const char *from = rule->text; *from != 0;) {
        const auto begins = [&](const Word &word) {
            return std::strncmp(from, word.word, std::strlen(word.word)) == 0;
        };
        const Word *const found = std::find_if(std::begin(known), std::end(known), begins);
        if (found == std::end(known)) {
            append(from++, 1);
            continue;
        }
        append(found->value, std::strlen(found->value));
        from += std::strlen(found->word);
    }
    text[length] = 0;
    throw Error(rule->status, "%s", text);
}

Facts facts_of(const dsopt_optimizer_desc &desc) {
    const auto flag = [&](int32_t bit) { return (desc.flags & bit) != 0; };
    return Facts()
        .add(facts::compat, desc.compat != DSOPT_COMPAT_NONE)
        .add(facts::data, desc.data != nullptr)
        .add(facts::node, desc.node != nullptr)
        .add(facts::experts, desc.expert_count != 0)
        .add(facts::masters_flat, desc.masters == DSOPT_MASTERS_FLAT)
        .add(facts::masters_remainder, desc.masters == DSOPT_MASTERS_REMAINDER)
        .add(facts::no_master, flag(DSOPT_OPTIMIZER_NO_MASTER))
        .add(facts::report_norms, flag(DSOPT_OPTIMIZER_REPORT_NORMS))
        .add(facts::stochastic_rounding, flag(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING))
        .add(facts::accumulate, flag(DSOPT_OPTIMIZER_ACCUMULATE))
        .add(facts::averages, flag(DSOPT_OPTIMIZER_AVERAGES))
        .add(facts::check_ranks, flag(DSOPT_OPTIMIZER_CHECK_RANKS))
        .add(facts::momentum_bits, flag(DSOPT_OPTIMIZER_MOMENTUM_BITS))
        .add(facts::shard, flag(DSOPT_OPTIMIZER_SHARD))
        .add(facts::shard_node, flag(DSOPT_OPTIMIZER_SHARD_NODE))
        .add(facts::split_matrices, flag(DSOPT_OPTIMIZER_SPLIT_MATRICES))
        .add(facts::bucket, desc.bucket != 0)
        .add(facts::buckets_in_flight, desc.buckets_in_flight != 0)
        .add(facts::early_update, flag(DSOPT_OPTIMIZER_EARLY_UPDATE))
        .add(facts::scaler, desc.scaler != nullptr)
        .add(facts::nonfinite_skip, desc.nonfinite == DSOPT_NONFINITE_SKIP)
        .add(facts::skip_budget, desc.skip_budget != 0)
        .add(facts::max_norm, desc.max_norm > 0);
}

} // namespace dsopt
