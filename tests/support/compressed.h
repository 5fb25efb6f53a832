// SPDX-License-Identifier: Apache-2.0
// One rank of the error-compensated 1-bit all-reduce.
#pragma once
#include "harness.h"

namespace test {

using Values = std::vector<std::vector<float>>; // one vector per tensor

/// One rank's list of tensors, and its error feedback.
class CompressedMean {
public:
    /// `node` NULL: one level.
    CompressedMean(const Comm &comm, const std::vector<int64_t> &sizes, int32_t compat = DSOPT_COMPAT_NONE,
                   dsopt_comm *node = nullptr) :
        comm_(comm) {
        args.size = sizeof args;
        args.compat = compat;
        args.node = node;
        for (const int64_t n : sizes) values.emplace_back(size_t(n));
        for (auto &tensor : values)
            list.push_back({tensor.size() == 0 ? nullptr : tensor.data(), int64_t(tensor.size()), DSOPT_DTYPE_F32, 0});
        args.tensors = list.data();
        args.count = int64_t(list.size());
        must(dsopt_compressed_sizes(comm.get(), &args, &workers, &servers, &bytes));
        worker.assign(size_t(workers), 0);
        server.assign(size_t(servers), 0);
        room_.assign(bytes + 256, 0);
        args.worker_error = worker.data();
        args.server_error = server.data();
        args.workspace = room_.data() + (256 - reinterpret_cast<uintptr_t>(room_.data()) % 256) % 256;
        args.workspace_bytes = bytes;
    }
    CompressedMean(const CompressedMean &) = delete;
    CompressedMean &operator=(const CompressedMean &) = delete;

    dsopt_status call() { return dsopt_compressed_allreduce(comm_.get(), &args); }
    dsopt_status call(const Values &x) {
        for (size_t i = 0; i < x.size(); ++i) std::copy(x[i].begin(), x[i].end(), values[i].begin());
        return call();
    }
    Values read() const { return {values.begin(), values.end()}; }
    struct Residuals {
        std::vector<float> worker, server;
    };
    Residuals residuals() const {
        const size_t elements = workers == 0 ? 0 : size_t(workers - args.count); // without the scales
        Residuals result{std::vector<float>(elements, 7),
                         std::vector<float>(elements / size_t(info_of(comm_).ranks), 7)};
        must(dsopt_compressed_errors(comm_.get(), &args, result.worker.data(), result.server.data()));
        return result;
    }

    std::vector<Shared<float>> values;
    std::vector<dsopt_tensor> list;
    Shared<float> worker, server;
    dsopt_compressed args{};
    int64_t workers = 0, servers = 0;
    size_t bytes = 0;

private:
    const Comm &comm_;
    Shared<char> room_;
};

} // namespace test
