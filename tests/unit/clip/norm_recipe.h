// SPDX-License-Identifier: Apache-2.0
// The function that the comment of dsopt_tensors_norm shows; the test header-recipe compares the two.
#pragma once
#include "dsopt.h"
#include <float.h>
#include <math.h>

static dsopt_status norm_over_ranks(dsopt_context *ctx, const dsopt_param *params, const dsopt_tensor *list,
                                    dsopt_tensor *part, int64_t count, dsopt_comm *model, int model_rank,
                                    dsopt_comm *const *experts, int32_t expert_count, double *norm) {
    double squares = 0;
    for (int32_t k = 0; k <= expert_count; ++k) { // 0: dense parameters
        dsopt_norm_result result;                 // on CUDA in device memory, read once the stream is done
        for (int64_t i = 0; i < count; ++i) {
            const int32_t flags = params[i].flags;
            const int elsewhere = model_rank > 0 && !(flags & DSOPT_PARAM_MODEL_PARALLEL);
            part[i] = list[i];
            if (params[i].expert != k || elsewhere || (flags & DSOPT_PARAM_REPLICATED)) part[i].data = NULL;
        }
        dsopt_comm *const comm = k == 0 ? model : experts[k - 1];
        dsopt_status status = dsopt_tensors_norm(ctx, part, count, DSOPT_NORM_L2, 0, comm, &result, NULL);
        if (status == DSOPT_OK && k > 0 && model != NULL) { // and over the model ranks; fp32 as in the originals
            float expert_norm = (float)result.norm;         // on CUDA in device memory
            const dsopt_tensor tensor = {&expert_norm, 1, DSOPT_DTYPE_F32, 0};
            status = dsopt_tensors_norm(ctx, &tensor, 1, DSOPT_NORM_L2, 0, model, &result, NULL);
        }
        if (status != DSOPT_OK) return status;
        squares += result.norm * result.norm;
    }
    *norm = squares <= DBL_MAX ? sqrt(squares) : -1;
    return DSOPT_OK;
}
