// SPDX-License-Identifier: Apache-2.0
// Functions on scalars in device memory, one thread each: device/one_thread.h.
#include "kernels.h"
#include "vec.cuh"

namespace dsopt::gpu {

template <class Function> __global__ void one_thread_kernel(GRID_CONSTANT const PdlArgument<Function> argument) {
    const Function &function = argument.begin_kernel();
    function();
}

void run_in_one_thread(const OneThreadFunction &function, const Launcher &launcher) {
    std::visit([&]<class Function>(
                   const Function &call) { launcher.launch_thread(Function::name, one_thread_kernel<Function>, call); },
               function);
}

template <class... Functions>
static void load_each(KernelLoader &load, std::type_identity<std::variant<Functions...>>) {
    load(one_thread_kernel<Functions>...);
}
void load_one_thread_kernels(KernelLoader &load) { load_each(load, std::type_identity<OneThreadFunction>()); }

} // namespace dsopt::gpu
