// SPDX-License-Identifier: Apache-2.0
#include "step/onebit.h"
#include "exchange/exchange.h"

namespace dsopt {

void OneBitDriver::send(Feed feed) {
    own_.feed(feed);
    if (!one_.exchanges) return;
    loops_.mark(DSOPT_MS_COMPRESS);
    dsopt::exchange(run_.context, run_.comms.data, run_.comms.node, own_.buffers(), plan_.parallel, plan_.stream);
    loops_.mark(DSOPT_MS_EXCHANGE);
}

void OneBitDriver::through(Feed feed) {
    send(feed);
    own_.take(feed);
    if (one_.exchanges) loops_.mark(DSOPT_MS_DECOMPRESS);
}

void OneBitDriver::lamb() {
    if (one_.compat) own_.scale_momenta();
    send(Feed::scaled);
    own_.lamb_moments();
    const bool shards = has_shards(plan_, true);
    if (shards) run_.context.device().clear(plan_.shard_sums, shard_bytes(plan_.shard_count), plan_.stream);
    own_.lamb_trust();
    if (shards) {
        agree_on_shards(plan_, run_.comms, true);
        own_.lamb_shared_trust();
    }
    own_.lamb_weights();
    if (one_.exchanges) loops_.mark(DSOPT_MS_DECOMPRESS);
}

void OneBitDriver::exchange() {
    if (one_.trust_factor != nullptr || steps_alone(one_)) own_.begin();
    if (one_.stage == Stage::dry || one_.stage == Stage::full) return; // nothing goes into an exchange
    if (one_.compat && one_.exchanges && loops_.is_skipped()) return;
    if (one_.stage == Stage::local) return own_.local();
    if (one_.stage == Stage::sync) return through(Feed::distance);
    switch (one_.rules.algorithm) {
    case DSOPT_ALGORITHM_ZERO_ONE_ADAM: return through(Feed::gradient);
    case DSOPT_ALGORITHM_ONEBIT_LAMB: return lamb();
    default: return through(Feed::momentum);
    }
}

void OneBitDriver::end() {
    ScheduleState next = one_.now; // in compat mode: if the step is taken
    const bool froze = advance_schedule(one_.rules, next);
    own_.end();
    // Only where an exchange follows: this reads the whole variance.
    if (one_.stage == Stage::full && one_.active != nullptr && stage_of(one_.rules, next) != Stage::full)
        own_.find_active();
    // The original forgets the copies when it was resumed past the freeze.
    const bool late = one_.compat && next.step != one_.rules.freeze_step;
    if (froze) own_.freeze(one_.rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late);
}

} // namespace dsopt
