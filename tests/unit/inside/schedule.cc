// SPDX-License-Identifier: Apache-2.0
// The schedule of the 1-bit family before any call, computed without iterating over the previous calls.
#include "rules/schedule.h"
#include <cstring>
#include <gtest/gtest.h>

using namespace dsopt;

namespace inside_schedule_tests {

constexpr int32_t kFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB};

bool same(const ScheduleState &a, const ScheduleState &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(ScheduleBefore, EqualsStepwiseSchedule) {
    for (const int32_t algorithm : kFamily)
        for (const int64_t freeze : {1, 2, 7, 64, 1000, 1999, INT32_MAX - 1})
            for (const int64_t var : {1, 2, 3, 16, INT32_MAX - 1})
                for (const int64_t local : {1, 2, 5, INT32_MAX - 1})
                    for (const int64_t most : {1, 2, 3, 16, INT32_MAX - 1}) {
                        const ScheduleRules rules{algorithm, freeze, var, local, most, false};
                        ScheduleState counted{};
                        for (int32_t call = 1; call <= 2000; ++call) {
                            ASSERT_TRUE(same(schedule_before(rules, call), counted))
                                << "algorithm " << algorithm << ", freeze " << freeze << ", intervals " << var << " "
                                << local << " " << most << ", call " << call;
                            (void)advance_schedule(rules, counted);
                        }
                    }
}

TEST(ScheduleBefore, AdvancesFromLastPossibleCall) {
    for (const int32_t algorithm : kFamily)
        for (const int64_t freeze : {1, 100000, INT32_MAX - 2, INT32_MAX - 1})
            for (const int64_t var : {1, 16, INT32_MAX - 1}) {
                const ScheduleRules rules{algorithm, freeze, var, 32678, 16, false};
                ScheduleState state = schedule_before(rules, INT32_MAX - 1);
                EXPECT_EQ(state.step, INT32_MAX - 2);
                (void)advance_schedule(rules, state);
                EXPECT_TRUE(same(schedule_before(rules, INT32_MAX), state)) << freeze << " " << var;
            }
}

} // namespace inside_schedule_tests
