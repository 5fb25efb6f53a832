// SPDX-License-Identifier: Apache-2.0
// The emulated CUDA backend: a second build of libdsopt.so.2, with the CUDA runtime and a device emulated on the CPU.
#pragma once

namespace replay {

/// True if this process has loaded that library, which exports the runtime's symbols, in place of the usual one.
bool is_emulated();

/// Restarts this program with that library. Returns only on failure, after printing the reason.
void become_emulated(char **argv);

} // namespace replay
