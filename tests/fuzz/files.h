// SPDX-License-Identifier: Apache-2.0
// Splits a checkpoint into its parts, and assembles it again with correct length, padding and checksums.
#pragma once
#include "harness.h"

namespace fuzz {

struct File {
    Bytes header, data;

    static File split(const Bytes &file);
    Bytes assembled(bool correct_tensors, bool correct_header) const;
};

} // namespace fuzz
