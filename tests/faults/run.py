#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants the faults of the files *.faults in a copy of the sources, one at a time, and checks that the tests find them.

A fault is a hunk of a unified diff without line numbers: lines with '-' are replaced by those with '+', and lines with
' ' stay. Its old lines must occur exactly once in its file. `effect` is what a user would see, `suites` are the Meson
tests that find it, the cheapest first. A fault is found if one of them fails or exceeds its time limit.

The copy is in the folder --work, with a build folder of the same options as --build, whose object files it takes over.
So a fault costs the compilation of one file, the programs of its suites and their run. Each suite must pass without a
fault first. A run of a suite is limited to five times that run's time and half a minute.

The last line is `N passed, N failed`: faults that were found, and faults that were not or do not compile.
"""
import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIELDS = ("file", "effect", "suites")
# Lines of a failed suite that name a case: GoogleTest, unittest, cargo, dsopt-replay.
CASES = (r"^\[  FAILED  \] (\w+\.[\w/]+)", r"^(?:FAIL|ERROR): (\w+) \(", r"^test (\S+) \.\.\. FAILED", r"^FAIL +(\S+)")


class Fault(NamedTuple):
    name: str
    file: str
    effect: str
    suites: List[str]
    old: str
    new: str

    def planted(self, text: str) -> str:
        """Returns a file with the fault. Raises ValueError unless its old lines occur exactly once."""
        places = [place.start() for place in re.finditer("^" + re.escape(self.old), text, re.MULTILINE)]
        if len(places) != 1:
            raise ValueError("%s: its lines occur %d times in %s, not once" % (self.name, len(places), self.file))
        return text[:places[0]] + self.new + text[places[0] + len(self.old):]


def read_faults() -> List[Fault]:
    faults: List[Fault] = []
    for path in sorted(HERE.glob("*.faults")):
        for block in re.split(r"^fault: ", path.read_text(), flags=re.MULTILINE)[1:]:
            name, *lines = block.rstrip("\n").split("\n")
            fields: Dict[str, str] = {}
            while lines and lines[0].partition(": ")[0] in FIELDS:
                key, _, value = lines.pop(0).partition(": ")
                fields[key] = value
            while lines and not lines[-1]:
                lines.pop()
            if set(fields) != set(FIELDS) or any(line[:1] not in ("-", "+", " ") for line in lines):
                raise ValueError("%s: fault '%s' is not in the format of run.py" % (path.name, name))
            old, new = ("".join(line[1:] + "\n" for line in lines if line[0] in " " + sign) for sign in "-+")
            faults.append(Fault(name, fields["file"], fields["effect"], fields["suites"].split(), old, new))
    return faults


def problems(faults: List[Fault], build: Optional[Path]) -> List[str]:
    """Returns what is wrong with the faults: equal names, lines that do not occur, suites that are no tests."""
    found: List[str] = []
    suites = {test["name"] for test in introspected(build, "tests")} if build else None
    for k, fault in enumerate(faults):
        if fault.name in [other.name for other in faults[:k]]:
            found.append("%s: two faults have this name" % fault.name)
        try:
            fault.planted((ROOT / fault.file).read_text())
        except (OSError, ValueError) as problem:
            found.append(str(problem))
        if fault.old == fault.new:
            found.append("%s: it changes nothing" % fault.name)
        for suite in fault.suites if suites is not None else ():
            if suite not in suites:
                found.append("%s: the build has no test '%s'" % (fault.name, suite))
    return found


def introspected(build: Path, what: str) -> Any:
    return json.loads((build / "meson-info" / ("intro-%s.json" % what)).read_text())


def seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def entries(folder: Path) -> Dict[str, os.stat_result]:
    """Returns all files and links below a folder."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in files + [name for name in folders if os.path.islink(os.path.join(place, name))]:
            path = os.path.join(place, name)
            found[os.path.relpath(path, folder)] = os.lstat(path)
    return found


def copy(source: Path, target: Path) -> None:
    """Copies a file or a link with its time of modification, by which Ninja decides what is up to date."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.exists():
        target.unlink()
    shutil.copy2(source, target, follow_symlinks=False)


def synchronize(source: Path, target: Path, only: Optional[Set[str]] = None, keep: str = "") -> List[str]:
    """Makes a folder the copy of another: all files, or `only` these. Files of the target whose names begin with
    `keep` stay. Returns the files that changed."""
    before, after = entries(target) if target.exists() else {}, entries(source)
    changed: List[str] = []
    for name, status in after.items():
        if only is not None and name not in only:
            continue
        now = before.get(name)
        if now is None or (now.st_size, now.st_mtime_ns, now.st_mode) != (status.st_size, status.st_mtime_ns,
                                                                          status.st_mode):
            copy(source / name, target / name)
            changed.append(name)
    for name in before:
        if (name not in after or (only is not None and name not in only)) and not (keep and name.startswith(keep)):
            (target / name).unlink()
            changed.append(name)
    return changed


def sources() -> Set[str]:
    """Returns the files of the working tree, without those that Git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    return {name for name in output.split("\0") if name and (ROOT / name).is_file()}


class Failed(Exception):
    """A build failed, or a suite that must pass."""


class Outcome(NamedTuple):
    result: str  # of Meson: OK, FAIL, TIMEOUT, ERROR, SKIP
    wall: float
    cpu: float
    cases: List[str]  # that failed, as far as the output names them

    @property
    def found(self) -> bool:
        return self.result not in ("OK", "SKIP")


class Copy:
    """A copy of the sources with a build folder, and a copy of that folder without any fault."""

    def __init__(self, build: Path, work: Path, jobs: int) -> None:
        self.original, self.jobs = build, jobs
        self.tree, self.clean = work / "tree", work / "clean"
        # The same place relative to the sources, so that the commands of the compiler are the same.
        inside = build.parent == ROOT
        self.build = self.tree / (build.name if inside else "build")
        self.passed_file = work / "passed.json"

    def call(self, *command: str, **environment: str) -> Tuple[int, str]:
        run = subprocess.run(command, cwd=self.tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env={**os.environ, **environment})
        return run.returncode, run.stdout.decode(errors="replace")

    def prepare(self, suites: List[str]) -> None:
        """Updates the copy, builds the programs of these suites and runs those that have not passed in it yet."""
        self.tree.mkdir(parents=True, exist_ok=True)
        if self.clean.exists():
            synchronize(self.clean, self.build)
        names = synchronize(ROOT, self.tree, sources(), keep=self.build.name + "/")
        changed = any(not name.startswith("tests/faults/") for name in names)
        if not (self.build / "build.ninja").exists():
            self.configure()
            changed = True
        self.tests = {test["name"]: test for test in introspected(self.build, "tests")}
        outputs = {target["id"]: target["filename"] for target in introspected(self.build, "targets")}
        self.targets = {name: [os.path.relpath(path, self.build) for id in test["depends"] for path in outputs[id]]
                        for name, test in self.tests.items()}
        if changed and self.passed_file.exists():
            self.passed_file.unlink()
        passed: Dict[str, float] = json.loads(self.passed_file.read_text()) if self.passed_file.exists() else {}
        self.passed = passed
        missing = [suite for suite in suites if suite not in passed]
        if not missing:
            return
        log = self.make(missing)
        if log:
            raise Failed("the copy does not build:\n" + log)
        for suite in missing:
            outcome = self.run(suite, False)
            if outcome.found:
                raise Failed("%s fails without a fault: %s" % (suite, ", ".join(outcome.cases)))
            passed[suite] = outcome.wall
            print("%s: passes without a fault in %.1f s of CPU time%s" %
                  (suite, outcome.cpu, " (skipped)" if outcome.result == "SKIP" else ""), flush=True)
        synchronize(self.build, self.clean)
        self.passed_file.write_text(json.dumps(passed))

    def configure(self) -> None:
        """Configures the copy with the options of the original, and takes over its files that are up to date."""
        given = RawConfigParser()
        given.optionxform = str  # type: ignore[assignment, method-assign]
        given.read(self.original / "meson-private" / "cmd_line.txt")
        options = ["-D%s=%s" % option for option in given.items("options") if option[0] != "cuda"]
        # Without CUDA, for which a fault in a kernel would be compiled once more, for several GPUs.
        status, output = self.call("meson", "setup", str(self.build), *options, "-Dcuda=disabled")
        if status:
            raise Failed("the copy cannot be configured:\n" + output)
        made = entries(self.build)
        for name, status_of in entries(self.original).items():
            if name.startswith("meson-") or name in ("build.ninja", "compile_commands.json"):
                continue
            old, new = self.original / name, self.build / name
            if name not in made:
                copy(old, new)
            elif not new.is_symlink() and old.read_bytes() == new.read_bytes():
                os.utime(new, ns=(status_of.st_atime_ns, status_of.st_mtime_ns))

    def make(self, suites: List[str]) -> str:
        """Builds the programs of these suites. Returns the end of the output if that fails."""
        targets = sorted({target for suite in suites for target in self.targets[suite]})
        if not targets:
            return ""
        status, output = self.call("ninja", "-C", str(self.build), "-j", str(self.jobs), *targets)
        return output[-3000:] if status else ""

    def run(self, suite: str, stops: bool) -> Outcome:
        """Runs a suite, `stops`: up to its first failed case."""
        limit = self.tests[suite]["timeout"]
        factor = (5 * self.passed[suite] + 30) / limit if suite in self.passed else 4
        before = seconds_of_children()
        self.call("meson", "test", "-C", str(self.build), "--no-rebuild", "--logbase", "fault", "-t", str(factor),
                  suite, **({"GTEST_FAIL_FAST": "1"} if stops else {}))
        cpu = seconds_of_children() - before
        log = [json.loads(line) for line in (self.build / "meson-logs" / "fault.json").read_text().splitlines()]
        if len(log) != 1:
            raise Failed("%s is %d tests" % (suite, len(log)))
        output = log[0].get("stdout") or ""
        cases = list(dict.fromkeys(name for form in CASES for name in re.findall(form, output, re.MULTILINE)))
        began = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        if not cases and began:  # it crashed or hung in this one
            cases = began[-1:]
        return Outcome(log[0]["result"], log[0]["duration"], cpu, cases)

    def with_fault(self, fault: Fault, all_suites: bool) -> "Record":
        path = self.tree / fault.file
        path.write_text(fault.planted(path.read_text()))
        record = Record(fault)
        try:
            for suite in fault.suites:
                before = seconds_of_children()
                log = self.make([suite])
                record.build += seconds_of_children() - before
                if log:
                    record.error = log
                    return record
                outcome = record.outcomes[suite] = self.run(suite, not all_suites)
                if outcome.found and not all_suites:
                    return record
        finally:
            copy(ROOT / fault.file, path)
            synchronize(self.clean, self.build)
        return record


class Record:
    def __init__(self, fault: Fault) -> None:
        self.fault, self.build, self.error = fault, 0.0, ""
        self.outcomes: Dict[str, Outcome] = {}

    @property
    def found(self) -> bool:
        return any(outcome.found for outcome in self.outcomes.values())

    def line(self) -> str:
        if self.error:
            return "%s: DOES NOT COMPILE\n%s" % (self.fault.name, self.error)
        seconds = "%.1f s to build, %.1f s to test" % (self.build, sum(one.cpu for one in self.outcomes.values()))
        by = [" ".join([suite] + ["at its time limit"] * (one.result == "TIMEOUT") +
                       ["(%s)" % ", ".join(one.cases[:3])] * bool(one.cases))
              for suite, one in self.outcomes.items() if one.found]
        if by:
            return "%s: found by %s; %s" % (self.fault.name, ", ".join(by), seconds)
        return "%s: SURVIVES %s; %s. %s" % (self.fault.name, ", ".join(self.outcomes), seconds, self.fault.effect)

    def json(self) -> Dict[str, Any]:
        return {"fault": self.fault.name, "file": self.fault.file, "build": self.build, "error": self.error,
                "suites": {suite: one._asdict() for suite, one in self.outcomes.items()}}


def table(records: List[Record]) -> List[str]:
    """Returns a line for each suite: the faults that it found, of those that it ran with."""
    lines = []
    for suite in sorted({suite for record in records for suite in record.outcomes}):
        ran = [record for record in records if suite in record.outcomes]
        found = [record.fault.name for record in ran if record.outcomes[suite].found]
        lines.append("%-22s %2d of %2d in %6.1f s: %s" % (
            suite, len(found), len(ran), sum(record.outcomes[suite].cpu for record in ran), " ".join(found)))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="a build folder with tests; its files are not changed")
    parser.add_argument("--work", type=Path, help="folder of the copy, kept for the next run; default: BUILD-faults")
    parser.add_argument("--part", help="I/N: the I-th of N parts of the faults")
    parser.add_argument("--matrix", action="store_true", help="run all suites of each fault; faults per suite")
    parser.add_argument("--check", action="store_true", help="only check that the faults fit the sources and the build")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of Ninja")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    options = parser.parse_args()

    build = options.build.resolve() if options.build else None
    faults = read_faults()
    if options.list:
        for fault in faults:
            print("%-36s %-36s %s" % (fault.name, fault.file, " ".join(fault.suites)))
        return 0
    wrong = problems(faults, build)
    print("".join(problem + "\n" for problem in wrong), end="")
    if options.check or wrong:
        print("%d passed, %d failed" % (max(0, len(faults) - len(wrong)), len(wrong)))
        return bool(wrong)
    if build is None:
        parser.error("--build is missing")
    unknown = set(options.names) - {fault.name for fault in faults}
    if unknown:
        parser.error("no such faults: " + ", ".join(sorted(unknown)))
    chosen = [fault for fault in faults if not options.names or fault.name in options.names]
    if options.part:
        part, parts = map(int, options.part.split("/"))
        chosen = chosen[(part - 1) * len(chosen) // parts:part * len(chosen) // parts]
    work = options.work.resolve() if options.work else build.with_name(build.name + "-faults")
    subject = Copy(build, work, options.jobs)
    records: List[Record] = []
    try:
        subject.prepare(list(dict.fromkeys(suite for fault in chosen for suite in fault.suites)))
        for fault in chosen:
            records.append(subject.with_fault(fault, options.matrix))
            print(records[-1].line(), flush=True)
    except Failed as problem:
        print(problem)
    if options.matrix:
        print("\n".join(table(records)))
    if options.json:
        options.json.write_text(json.dumps([record.json() for record in records], indent=1) + "\n")
    passed = sum(record.found for record in records)
    print("%d passed, %d failed" % (passed, len(chosen) - passed))
    return passed != len(chosen)


if __name__ == "__main__":
    sys.exit(main())
