// SPDX-License-Identifier: Apache-2.0
// The emulated CUDA backend: libdsopt.so.1 built once more, with the CUDA runtime and a device played on the CPU.
#pragma once

namespace replay {

/// Whether this process has that library, which brings the symbols of the runtime along, in place of the usual one.
bool is_emulated();

/// Starts this program anew with that library; returns only on failure, after saying why.
void become_emulated(char **argv);

} // namespace replay
