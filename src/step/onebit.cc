// SPDX-License-Identifier: Apache-2.0
#include "step/onebit.h"
#include "exchange/exchange.h"
#include "step/agree.h"

namespace dsopt {

void OneBitDriver::feed_and_exchange(Feed feed) {
    loops_.feed(feed);
    if (!family_.exchanges) return;
    const Execution &how = run_.plan.how;
    steps_.mark(DSOPT_MS_COMPRESS);
    exchange(run_.context, run_.comms.data, run_.comms.node, loops_.buffers(), how.parallel, how.stream);
    steps_.mark(DSOPT_MS_EXCHANGE);
}

void OneBitDriver::update_adam(Feed feed) {
    feed_and_exchange(feed);
    loops_.take(feed);
    if (family_.exchanges) steps_.mark(DSOPT_MS_DECOMPRESS);
}

void OneBitDriver::update_lamb() {
    if (family_.compat) loops_.scale_momenta();
    feed_and_exchange(Feed::scaled);
    loops_.lamb_moments();
    const bool shards = begin_shards(run_, true);
    loops_.lamb_trust();
    if (shards) {
        agree_on_shards(run_, true);
        loops_.lamb_shared_trust();
    }
    loops_.lamb_weights();
    if (family_.exchanges) steps_.mark(DSOPT_MS_DECOMPRESS);
}

void OneBitDriver::update() {
    if (family_.trust_factor != nullptr || steps_alone(family_)) loops_.begin();
    if (family_.stage == Stage::dry || family_.stage == Stage::full) return; // nothing goes into an exchange
    if (family_.compat && family_.exchanges && steps_.is_skipped()) return;
    if (family_.stage == Stage::local) return loops_.local();
    if (family_.stage == Stage::sync) return update_adam(Feed::distance);
    switch (family_.rules.algorithm) {
    case DSOPT_ALGORITHM_ZERO_ONE_ADAM: return update_adam(Feed::gradient);
    case DSOPT_ALGORITHM_ONEBIT_LAMB: return update_lamb();
    default: return update_adam(Feed::momentum);
    }
}

void OneBitDriver::end() {
    ScheduleState next = family_.now; // in compat mode: if the step is taken
    const bool froze = advance_schedule(family_.rules, next);
    loops_.end();
    // Only where an exchange follows: this reads the whole variance.
    if (family_.stage == Stage::full && family_.active != nullptr && stage_of(family_.rules, next) != Stage::full)
        loops_.find_active();
    // The original forgets the copies when it was resumed past the freeze.
    const bool late = family_.compat && next.step != family_.rules.freeze_step;
    if (froze) loops_.freeze(family_.rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late);
}

} // namespace dsopt
