#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""one_core.py PROGRAM ARGUMENT...: runs a program on a core that no other program of this script uses.

Builds for coverage count with atomic additions: threads that run the same code on several cores pass the counters from
cache to cache, and take twice the processor time of the same threads on one core. Suites of the thread pool keep all
cores: it waits in another way where there is one.
"""
import fcntl
import os
import sys
import time

if {"unit/threads", "unit/inside"} & set(sys.argv):
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    for core in os.sched_getaffinity(0):
        try:
            lock = os.open("/sys/devices/system/cpu/cpu%d" % core, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:  # a system without this folder: slower, with the same counts
            os.execvp(sys.argv[1], sys.argv[1:])
        os.set_inheritable(lock, True)  # the program holds the lock until it ends
        os.sched_setaffinity(0, {core})
        os.execvp(sys.argv[1], sys.argv[1:])
    time.sleep(0.05)
