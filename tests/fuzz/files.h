// SPDX-License-Identifier: Apache-2.0
// A checkpoint taken apart, and put together again with what guards it made right: length, padding, checksums.
#pragma once
#include "harness.h"

namespace fuzz {

struct File {
    Bytes header, data;

    static File split(const Bytes &file);
    Bytes assembled(bool right_tensors, bool right_header) const;
};

} // namespace fuzz
