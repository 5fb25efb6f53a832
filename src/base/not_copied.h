// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsopt {

/// Base of classes that own a resource exclusively, or whose address is stored elsewhere: they are neither copied nor
/// moved.
class NotCopied {
public:
    NotCopied() = default;
    NotCopied(const NotCopied &) = delete;
    NotCopied &operator=(const NotCopied &) = delete;
};

} // namespace dsopt
