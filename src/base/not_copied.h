// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsopt {

/// A base of what owns something that there is once, or is where others know it to be: neither copied nor moved.
class NotCopied {
public:
    NotCopied() = default;
    NotCopied(const NotCopied &) = delete;
    NotCopied &operator=(const NotCopied &) = delete;
};

} // namespace dsopt
