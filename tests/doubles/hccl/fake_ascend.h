// SPDX-License-Identifier: Apache-2.0
// A test double of libascendcl.so: memory that the host must copy to and from, asynchronous streams, and a current
// context per thread. The functions below are for the double of libhccl.so.
#pragma once
#include <functional>

extern "C" int aclrtSetDevice(int device);
/// Enqueues work on a stream; returns 0 or an error.
int fake_ascend_launch(void *stream, std::function<void()> work);
/// Returns true if all of the bytes are device memory and the calling thread has a context.
bool fake_ascend_owns(const void *memory, size_t bytes);
