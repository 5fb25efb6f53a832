// SPDX-License-Identifier: Apache-2.0
// dsopt_compressed_allreduce and the functions around it: exchanges without an optimizer.
#include "base/sizes.h"
#include "base/struct_io.h"
#include "base/tensor_list.h"
#include "exchange/exchange.h"

namespace dsopt {

OwnedLayout make_layout(const Comm &comm, const Comm *node, const dsopt_compressed &args) {
    if (args.compat != DSOPT_COMPAT_NONE && args.compat != DSOPT_COMPAT_DEEPSPEED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.compat is %d, which this library does not know", args.compat);
    if (args.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.reserved is %d, must be 0", args.reserved);
    if (args.count < 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.count is %lld", ll(args.count));
    if (args.count > 0) not_null(args.tensors, "dsopt_compressed.tensors");
    std::vector<int64_t> numels;
    int64_t total = 0;
    for (int64_t i = 0; i < args.count; ++i) {
        const std::string name = std::to_string(i);
        check_like(args.tensors[i], DSOPT_DTYPE_F32, args.tensors[i].numel, {"compressed tensor", name.c_str()});
        numels.push_back(args.tensors[i].numel);
        total += args.tensors[i].numel;
        if (total > (int64_t(1) << 56))
            throw Error(DSOPT_ERR_SHAPE, "the compressed tensors have more than 2^56 elements");
    }
    node = check_node(&comm, node, args.compat);
    return layout_for(data_rank_of(&comm, node), args.compat == DSOPT_COMPAT_DEEPSPEED, numels);
}

void compressed_allreduce(Comm &comm, Comm *node, const dsopt_compressed &args) {
    const OwnedLayout layout = make_layout(comm, node, args);
    for (int64_t i = 0; i < args.count; ++i)
        if (args.tensors[i].data == nullptr && args.tensors[i].numel != 0)
            throw Error(DSOPT_ERR_ARGUMENT, "compressed tensor '%lld' has no memory", ll(i));
    if (layout.whole.worker_numel == 0) return; // nothing to send, on any rank
    if (!layout.is_exact() && (args.worker_error == nullptr || args.server_error == nullptr))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.worker_error or server_error is NULL");
    for (const float *buffer : {args.worker_error, args.server_error}) check_aligned(buffer, 4, "an error buffer");
    const size_t slack = alignment_padding(args.workspace), needed = Exchange::workspace_bytes(layout) + slack;
    if (args.workspace == nullptr || args.workspace_bytes < needed)
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_compressed.workspace has %zu bytes, %zu are needed",
                    args.workspace == nullptr ? size_t(0) : args.workspace_bytes, needed);
    const Context &context = *comm.context();
    context.device().check_stream(args.stream);
    const Exchange buffers(layout, args.worker_error, args.server_error, nullptr,
                           static_cast<char *>(args.workspace) + slack);
    Comm *const node_comm = layout.has_levels() ? node : nullptr;
    reserve_exchange(&comm, node_comm, layout, ExchangeUse::list, args.stream);
    const auto run = [&](ExchangeKernels &kernels) {
        prepare_exchange(kernels, buffers,
                         [&] { kernels.run(layout.has_levels() ? ExchangePass::copy_list : ExchangePass::pack_list); });
        // A failure between two collectives makes the comms unusable: ranks would pair different collectives.
        unusable_on_failure({&comm, nullptr, nullptr, 0, node_comm}, [&] {
            exchange(&comm, node_comm, kernels, buffers, args.stream);
            kernels.run(ExchangePass::decode);
        });
    };
    context.device().kernels().run_exchange(buffers, args.tensors, args.count, context.parallel(), args.stream, run);
}

void compressed_errors(const Comm &comm, const Comm *node, const dsopt_compressed &args, float *worker, float *server) {
    const OwnedLayout layout = make_layout(comm, node, args);
    if (layout.slice.worker_numel == 0) return; // there are no residuals
    if (args.worker_error == nullptr || args.server_error == nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.worker_error or server_error is NULL");
    const Exchange buffers(layout, args.worker_error, args.server_error, nullptr, nullptr);
    const Device &device = comm.context()->device();
    device.check_stream(args.stream);
    (void)device.finished(args.stream); // refuses a stream that is being captured
    device.wait(args.stream);
    read_residuals(device, buffers, worker, server);
}

} // namespace dsopt
