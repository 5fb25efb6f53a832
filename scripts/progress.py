#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ninja, `pip wheel -v` or `meson test` and shows the progress.

usage: progress.py [--durations LOG] NAME PHASE COMMAND...

On a terminal one line is overwritten; elsewhere there is a line every 30 seconds. It names the last target that was
built or the last test that finished. The command's output is shown only if a build fails: errors first, then the end.
Exits with the command's status. LOG (meson-logs/testlog.json of an earlier run, optional) has the duration of each
test, for a better estimate of the remaining time.
"""
import json
import queue
import re
import subprocess
import sys
import threading
import time

EVERY = 30  # seconds between two lines without a terminal
NINJA = re.compile(r"\s*\[(\d+)/(\d+)\].* (\S+)$")  # pip indents it
MESON = re.compile(r"\s*(\d+)/(\d+)\s+(?:\S+ / )?(\S+)\s")
ERRORS = re.compile(r"(error|failed):", re.IGNORECASE)


def earlier(path):
    """Returns the duration of each test in seconds, by name."""
    try:
        with open(path, encoding="utf-8") as lines:
            return {test["name"]: max(test["duration"], 0.1) for test in map(json.loads, lines)}
    except (OSError, ValueError, KeyError):
        return {}


def spell(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Progress:
    def __init__(self, name, phase, durations):
        self.name, self.phase, self.durations = name, phase, durations
        self.begin = time.monotonic()
        self.done = self.total = 0
        self.finished = 0.0  # seconds that the finished tests took in the earlier run
        self.terminal = sys.stdout.isatty()
        self.shown = 0.0 if self.terminal else self.begin
        self.last = ""  # what was built or tested last

    def read(self, line):
        found = NINJA.match(line) or MESON.match(line)
        if not found:
            return
        self.done, self.total = int(found[1]), int(found[2])
        self.last = found[3].rpartition("/")[2]
        if found.re is MESON:
            self.finished += self.durations.get(found[3], 0)

    def left(self):
        """Returns the remaining seconds, or None if they are not known yet."""
        elapsed = time.monotonic() - self.begin
        share = self.done / self.total if self.total else 0
        if self.durations and self.finished:
            share = min(self.finished / max(sum(self.durations.values()), self.finished), 0.999)
        return elapsed / share - elapsed if share > 0.02 and elapsed > 2 else None

    def show(self):
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else EVERY):
            return
        self.shown = now
        text = f"{self.name}: {self.phase} {self.done} of {self.total or '?'}"
        if self.last:
            text += f" ({self.last})"
        left = self.left()
        if left is not None and self.done < self.total:
            text += f", about {spell(left)} left"
        print(f"\r{text}\033[K" if self.terminal else text, end="" if self.terminal else "\n", flush=True)

    def close(self):
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def main():
    arguments = sys.argv[1:]
    durations = {}
    if arguments[0] == "--durations":
        durations = {name: took for name, took in earlier(arguments[1]).items() if name in arguments}
        arguments = arguments[2:]
    progress = Progress(arguments[0], arguments[1], durations)
    output = []
    lines = queue.Queue()
    with subprocess.Popen(arguments[2:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace") as child:
        def listen():
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=listen, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=0.5)
            except queue.Empty:
                progress.show()
                continue
            if line is None:
                break
            output.append(line)
            progress.read(line)
            progress.show()
        status = child.wait()
    progress.close()
    if status != 0 and progress.phase == "build":
        print("".join([line for line in output if ERRORS.search(line)][:20]), "".join(output[-40:]), sep="", end="")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
