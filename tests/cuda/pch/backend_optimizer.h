// SPDX-License-Identifier: Apache-2.0
// Precompiled for programs of many files.
#include "../backend_optimizer.h"
