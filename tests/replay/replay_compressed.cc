// SPDX-License-Identifier: Apache-2.0
// compressed_allreduce: the exchange alone, all buffers of a call in one exchange.
#include "cases.h"
#include "layout.h"
#include "wire.h"

namespace replay {
namespace {

class CompressedRank {
public:
    CompressedRank(const Case &recorded, Wire &wire, int64_t rank, const std::vector<int64_t> &numels, int64_t steps) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        wire_(wire),
        rank_(rank),
        engine_(recorded.backend),
        comm_(engine_, wire, rank),
        layout_(padded_layout(numels, wire.ranks())) {
        for (size_t b = 0; b < numels.size(); ++b) {
            const std::string item = "b" + std::to_string(b);
            const Padded &padded = layout_[b];
            const auto output = [&](const char *name, std::vector<int64_t> shape) {
                shape.insert(shape.begin(), steps);
                return &comparison_.output(file_.name_of(name, rank, item), shape);
            };
            arrays_.emplace_back(engine_, DSOPT_DTYPE_F32, numels[b]);
            tensors_.push_back(arrays_.back().tensor());
            buffers_.push_back(
                {&comparison_.input(file_.name_of("input", rank, item), DSOPT_DTYPE_F32, {steps, numels[b]}),
                 output("output", {numels[b]}), output("worker_error", {padded.padded}),
                 output("server_error", {padded.chunk}), output("worker_scale", {}), output("server_scale", {}),
                 output("worker_sign_bits", {wire.ranks(), padded.chunk / 8}),
                 output("server_sign_bits", {padded.chunk / 8})});
        }
        args_.size = sizeof args_;
        args_.tensors = tensors_.data();
        args_.count = int64_t(tensors_.size());
        args_.compat = DSOPT_COMPAT_DEEPSPEED;
        int64_t worker = 0, server = 0;
        check(dsopt_compressed_sizes(comm_.get(), &args_, &worker, &server, &args_.workspace_bytes),
              "dsopt_compressed_sizes");
        worker_floats_ = worker;
        server_floats_ = server;
        for (const int64_t numel : {worker, server, int64_t(args_.workspace_bytes / 4 + 128)}) {
            memory_.emplace_back(engine_, DSOPT_DTYPE_F32, numel);
            memory_.back().upload(std::vector<float>(size_t(numel) + 1).data());
        }
        args_.worker_error = static_cast<float *>(memory_[0].data());
        args_.server_error = static_cast<float *>(memory_[1].data());
        const auto address = reinterpret_cast<uintptr_t>(memory_[2].data());
        args_.workspace = reinterpret_cast<void *>((address + 255) / 256 * 256);
    }

    void call(int64_t t) {
        for (size_t b = 0; b < buffers_.size(); ++b) arrays_[b].upload(buffers_[b].input->row(t));
        check(dsopt_compressed_allreduce(comm_.get(), &args_), "dsopt_compressed_allreduce");
    }

    void compare(int64_t t) {
        std::vector<float> worker(static_cast<size_t>(worker_floats_)), server(static_cast<size_t>(server_floats_));
        check(dsopt_compressed_errors(comm_.get(), &args_, worker.data(), server.data()), "dsopt_compressed_errors");
        const size_t row = wire_.gathered(rank_).size();
        for (size_t b = 0; b < buffers_.size(); ++b) {
            const Padded &padded = layout_[b];
            const Message first{wire_.sent_to_all(rank_).data(), buffers_.size()};
            const Message result{wire_.gathered(rank_).data(), buffers_.size()};
            comparison_.row(*buffers_[b].output, t, arrays_[b].values());
            comparison_.row(*buffers_[b].worker_error, t, part(worker, padded.worker, padded.padded), rule(b, true));
            comparison_.row(*buffers_[b].server_error, t, part(server, padded.server, padded.chunk), rule(b, false));
            comparison_.row(*buffers_[b].worker_scale, t, {first.scale(b)});
            comparison_.row(*buffers_[b].server_scale, t, {result.scale(b)});
            comparison_.row(*buffers_[b].server_sign_bits, t, result.bytes(padded));
            std::vector<double> bits;
            for (int64_t d = 0; d < wire_.ranks(); ++d) {
                const Message to{wire_.sent_to_all(rank_).data() + size_t(d) * row, buffers_.size()};
                const std::vector<double> part = to.bytes(padded);
                bits.insert(bits.end(), part.begin(), part.end());
            }
            comparison_.row(*buffers_[b].worker_sign_bits, t, bits);
        }
    }

private:
    struct Buffer {
        const Tensor *input, *output, *worker_error, *server_error, *worker_scale, *server_scale, *worker_sign_bits,
            *server_sign_bits;
    };
    static std::vector<double> part(const std::vector<float> &all, int64_t begin, int64_t numel) {
        return {all.begin() + begin, all.begin() + begin + numel};
    }
    Rule rule(size_t b, bool worker) {
        const Buffer &buffer = buffers_[b];
        return worker ? error_rule(comparison_, *buffer.worker_error, *buffer.worker_scale)
                      : error_rule(comparison_, *buffer.server_error, *buffer.server_scale);
    }

    GoldenFile &file_;
    Comparison &comparison_;
    Wire &wire_;
    int64_t rank_;
    Engine engine_;
    Comm comm_;
    std::vector<Padded> layout_;
    std::vector<Array> arrays_, memory_;
    std::vector<dsopt_tensor> tensors_;
    std::vector<Buffer> buffers_;
    dsopt_compressed args_{};
    int64_t worker_floats_ = 0, server_floats_ = 0;
};

} // namespace

void replay_compressed_allreduce(const Case &recorded) {
    GoldenFile &file = recorded.file;
    file.ignore("min_sign_margin");
    const int64_t steps = read_steps(file);
    Wire wire(read_ranks(file));
    std::vector<int64_t> numels;
    for (const std::vector<int64_t> &shape : read_shapes(file, "buffer_shapes")) numels.push_back(product(shape));
    std::vector<std::unique_ptr<CompressedRank>> ranks;
    for (int64_t r = 0; r < wire.ranks(); ++r)
        ranks.push_back(std::make_unique<CompressedRank>(recorded, wire, r, numels, steps));
    for (int64_t t = 0; t < steps; ++t) {
        wire.on_all([&](int64_t r) { ranks[size_t(r)]->call(t); });
        for (const auto &rank : ranks) rank->compare(t);
    }
}

} // namespace replay
