#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""one_core.py PROGRAM ARGUMENT...: runs a program on a core that no other program of this script uses.

Builds for coverage count with atomic additions: threads that run the same code on several cores pass the counters from
cache to cache, and take twice the processor time of the same threads on one core.
"""
import fcntl
import os
import sys
import time

while True:
    for core in os.sched_getaffinity(0):
        lock = os.open("/sys/devices/system/cpu/cpu%d" % core, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        os.set_inheritable(lock, True)  # the program holds the lock until it ends
        os.sched_setaffinity(0, {core})
        os.execvp(sys.argv[1], sys.argv[1:])
    time.sleep(0.05)
