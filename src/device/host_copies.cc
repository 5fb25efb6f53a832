// SPDX-License-Identifier: Apache-2.0
#include "device/host_copies.h"
#include <algorithm>
#include <exception>

namespace dsopt {

PinnedPair::PinnedPair(const Device &device) : device_(device) {
    for (Half &half : halves_) half = {device.host_buffer(kPiece), device.make_pending_work()};
}
PinnedPair::~PinnedPair() {
    for (int half = 0; half < 2; ++half) try {
            wait(half);
        } catch (const std::exception &) {} // the device has failed
}
void PinnedPair::copy(int half, void *to, const void *from, size_t bytes) {
    const Enqueues work(halves_[half].copies.get(), device_.copy_stream());
    device_.enqueue_copy(to, from, bytes, device_.copy_stream());
}

const void *HostReader::view(const void *from, size_t bytes, size_t rest) {
    if (!pair_) return from;
    const char *begin = static_cast<const char *>(from);
    if (begin != expected_ || bytes != ready_) fetch(begin, bytes);
    const int current = next_;
    pair_->wait(current);
    next_ = 1 - next_;
    expected_ = nullptr;
    if (rest != 0) fetch(begin + bytes, std::min(rest, kPiece));
    return pair_->buffer(current);
}
void HostReader::fetch(const char *from, size_t bytes) {
    pair_->copy(next_, pair_->buffer(next_), from, bytes);
    expected_ = from;
    ready_ = bytes;
}

void *HostWriter::buffer() {
    pair_.wait(next_);
    return pair_.buffer(next_);
}
void HostWriter::write(void *to, size_t bytes) {
    pair_.copy(next_, to, pair_.buffer(next_), bytes);
    next_ = 1 - next_;
}
void HostWriter::finish() const {
    for (int half = 0; half < 2; ++half) pair_.wait(half);
}

} // namespace dsopt
