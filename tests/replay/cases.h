// SPDX-License-Identifier: Apache-2.0
// One function per algorithm: passes the recorded inputs to the engine and compares everything else. To add one, write
// its file and add a line to the table in main.cc.
#pragma once
#include "compare.h"
#include "golden_file.h"

namespace replay {

struct Case {
    GoldenFile &file;
    Comparison &comparison;
    int32_t backend; ///< DSOPT_BACKEND_CPU or DSOPT_BACKEND_CUDA
};

void replay_fused_adam(const Case &recorded);
void replay_fused_lamb(const Case &recorded);
void replay_compressed_allreduce(const Case &recorded);
void replay_onebit_adam(const Case &recorded);
void replay_zero_one_adam(const Case &recorded);
void replay_onebit_lamb(const Case &recorded);
void replay_dynamic_loss_scaler(const Case &recorded);
void replay_fp16_scale_rule(const Case &recorded);
void replay_fp16_optimizer(const Case &recorded);
void replay_low_precision(const Case &recorded);
void replay_low_precision_codecs(const Case &recorded);
void replay_low_precision_maps(const Case &recorded);
void replay_low_precision_import(const Case &recorded);
void replay_muon(const Case &recorded);

} // namespace replay
