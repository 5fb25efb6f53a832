// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsopt {

/// Base of classes that own something alone, or whose address others keep: they are neither copied nor moved.
class NotCopied {
public:
    NotCopied() = default;
    NotCopied(const NotCopied &) = delete;
    NotCopied &operator=(const NotCopied &) = delete;
};

} // namespace dsopt
