// SPDX-License-Identifier: Apache-2.0
// A test double of libascendcl.so: memory that the host must copy to and from, streams that work by themselves, a
// current context a thread. What the double of libhccl.so asks of it is below.
#pragma once
#include <functional>

extern "C" int aclrtSetDevice(int device);
/// Puts work on a stream; 0 or an error.
int fake_ascend_launch(void *stream, std::function<void()> work);
/// Whether all of it is memory of the device, and the calling thread has a context.
bool fake_ascend_owns(const void *memory, size_t bytes);
