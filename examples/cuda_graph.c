// SPDX-License-Identifier: Apache-2.0
// A CUDA graph: the step is captured once and replayed. The learning rate is a float in device memory.
// cc cuda_graph.c $(pkg-config --cflags --libs dsopt) -lcudart, with the include and library paths of the CUDA toolkit
#include <cuda_runtime.h>
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}
static void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

int main(void) {
    float w[3], g[3], lr, *on_device; // on_device: 3 weights, 3 gradients, the learning rate
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_context_desc, cuda);
    DSOPT_NEW(dsopt_step, step);
    cuda.backend = DSOPT_BACKEND_CUDA;
    check(dsopt_context_create(&cuda, &ctx));
    check_cuda(cudaStreamCreate(&stream));
    check_cuda(cudaMalloc((void **)&on_device, 8 * sizeof(float)));
    check_cuda(cudaMemsetAsync(on_device, 0, 8 * sizeof(float), stream));
    const dsopt_tensor grad = {on_device + 3, 3, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {{on_device, 3, DSOPT_DTYPE_F32, 0}, "w", NULL, 0, 0, 0, 0, 0, 0, 0};
    check(dsopt_optimizer_create(ctx, NULL, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.weight_decay = 0; // the default of AdamW is 0.01
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));
    step.grads = &grad;
    step.count = 1;
    step.lr = on_device + 6;
    step.stream = stream;
    check(dsopt_optimizer_step(opt, &step)); // the first step allocates; gradients and learning rate are 0
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    check(dsopt_optimizer_step(opt, &step)); // recorded, not run
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 4000; ++i) {
        const float x[3] = {(float)(i % 7) / 7, (float)(i % 5) / 5, 1};
        check_cuda(cudaMemcpyAsync(w, on_device, sizeof w, cudaMemcpyDeviceToHost, stream));
        check_cuda(cudaStreamSynchronize(stream));
        float e = w[0] * x[0] + w[1] * x[1] + w[2] - (2 * x[0] - 3 * x[1] + 1);
        for (int k = 0; k < 3; ++k) g[k] = e * x[k];
        lr = i < 3000 ? 0.02f : 0.002f;
        check_cuda(cudaMemcpyAsync(on_device + 3, g, sizeof g, cudaMemcpyHostToDevice, stream));
        check_cuda(cudaMemcpyAsync(on_device + 6, &lr, sizeof lr, cudaMemcpyHostToDevice, stream));
        check_cuda(cudaGraphLaunch(replay, stream));
    }
    check_cuda(cudaStreamSynchronize(stream));
    printf("%.2f %.2f %.2f\n", (double)w[0], (double)w[1], (double)w[2]);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
    check_cuda(cudaGraphExecDestroy(replay));
    check_cuda(cudaGraphDestroy(graph));
    check_cuda(cudaFree(on_device));
    check_cuda(cudaStreamDestroy(stream));
    return 0;
}

// Prints:
// 2.00 -3.00 1.00
