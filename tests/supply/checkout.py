#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the tracked files are not larger than a limit.

usage: checkout.py ROOT BYTES

Prints the largest folders if they are. Exits with 77 outside a git checkout.
"""
import collections
import os
import subprocess
import sys


def main(root, limit):
    # A source tree can be in the checkout of another project.
    if not os.path.exists(os.path.join(root, ".git")):
        print("skipped: this is no git checkout")
        return 77
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], stdout=subprocess.PIPE, check=False)
    if listed.returncode != 0:
        print("skipped: git does not list the files")
        return 77
    sizes = collections.Counter()
    for name in listed.stdout.split(b"\0")[:-1]:
        path = os.path.join(os.fsencode(root), name)
        if os.path.lexists(path):
            sizes[b"/".join(name.split(b"/")[:-1][:2])] += os.lstat(path).st_size
    total = sum(sizes.values())
    print(f"{total} bytes in tracked files, at most {limit}")
    if 0 < total <= limit:
        return 0
    for folder, size in sizes.most_common(10):
        print(f"{size:10} {folder.decode(errors='replace') or '.'}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
