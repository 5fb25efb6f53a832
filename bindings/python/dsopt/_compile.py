# SPDX-License-Identifier: Apache-2.0
"""A C++ library between libdsopt and a framework: the package's if it matches the installed framework, else compiled
against it on first use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence

from . import _abi as abi
from ._versions import missing

_HEADERS = ("dsopt.h", "dsopt_dl.h")
_BUILDING = "dsopt-building-"  # prefix of the folder of a compilation, in the cache


def headers() -> str:
    """Returns the folder of dsopt.h and dsopt_dl.h: in the package, the source tree, or next to an installed
    library."""
    library = os.path.dirname(os.path.realpath(abi.path))
    places = [
        os.path.join(abi.HERE, "include"),
        os.path.join(abi.HERE, "..", "..", "..", "include"),
        os.path.join(library, "..", "include"),
        "/usr/include",
        "/usr/local/include",
    ]
    for place in map(os.path.abspath, places):
        if all(os.path.exists(os.path.join(place, name)) for name in _HEADERS):
            return place
    raise missing("dsopt_dl.h is not in %s: it is needed to compile" % ", ".join(places))


def _cache() -> Optional[str]:
    """Returns the folder of compiled libraries, or None for a user without a home folder: in a container a user may
    have neither HOME nor an entry in the list of users."""
    chosen = os.environ.get("DSOPT_CACHE")
    if chosen:
        return os.path.abspath(chosen)
    for parent in (os.environ.get("XDG_CACHE_HOME") or "", os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(parent):
            return os.path.join(parent, "dsopt")
    return None


@contextlib.contextmanager
def _lock(folder: str) -> Iterator[bool]:
    """Waits until no other process compiles in this folder. Yields False where files cannot be locked, such as on some
    network file systems: then processes compile concurrently."""
    try:
        file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)  # to be written, for NFS
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(file)  # unlocks it, as the end of a killed process does


def _remove_abandoned(folder: str) -> None:
    """Removes what killed processes were compiling. The caller has the lock, so no other process is compiling."""
    for name in os.listdir(folder):
        if name.startswith(_BUILDING):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


@dataclass
class Extension:
    """Sources, target and flags of a library. `variable` names the environment variable with the path of an existing
    library, `prebuilt` is the path of the library in the package."""

    module: str
    what: str
    framework: str
    framework_version: str
    variable: str
    source: str
    other_sources: Sequence[str]
    flags: Sequence[str]
    libraries: Sequence[str]
    prebuilt: Optional[str] = None

    def path(self) -> str:
        """Returns the path of the library for the installed framework, which is compiled if it does not exist yet."""
        chosen = os.environ.get(self.variable)
        if chosen:
            return chosen
        if self.prebuilt is not None:
            return self.prebuilt
        include, cache = headers(), _cache()
        if cache is None:
            raise missing(
                "%s cannot keep its compiled %s: this user has no home folder. Set DSOPT_CACHE to a folder that can be "
                "written" % (self.module, self.what)
            )
        path = os.path.join(cache, self._file_name(include))
        if not os.path.exists(path):
            self._build(path, include)
        return path

    def _file_name(self, include: str) -> str:
        """Returns a name with the versions and a hash of sources and flags."""
        digest = hashlib.sha256("\0".join([*self.flags, "", *self.libraries]).encode())
        for path in (__file__, self.source, *self.other_sources, *(os.path.join(include, name) for name in _HEADERS)):
            with open(path, "rb") as file:
                digest.update(file.read())
        return "%s-%s-%s-%s-%s.so" % (
            self.module.replace(".", "-"),
            abi.description["version"],
            self.framework.lower(),
            self.framework_version,
            digest.hexdigest()[:16],
        )

    def _compiler(self) -> List[str]:
        chosen = os.environ.get("CXX")
        if chosen:
            return shlex.split(chosen)
        for name in ("c++", "g++", "clang++"):
            if shutil.which(name):
                return [name]
        raise missing(
            "%s compiles its %s against the headers of %s %s on first use, and there is no C++ compiler. Install one "
            "(Debian: g++), name it in CXX, or set %s to the path of one that was compiled elsewhere for this %s"
            % (self.module, self.what, self.framework, self.framework_version, self.variable, self.framework)
        )

    def _build(self, path: str, include: str) -> None:
        """One of several processes compiles, and the others wait for it. The library is renamed to `path` when it is
        complete, because processes may not see each other's lock."""
        cache = os.path.dirname(path)
        try:
            os.makedirs(cache, mode=0o700, exist_ok=True)
            with _lock(cache) as locked:
                if os.path.exists(path):
                    return
                if locked:
                    _remove_abandoned(cache)
                folder = tempfile.TemporaryDirectory(prefix=_BUILDING, dir=cache)
                self._compile(path, include, folder)
        except OSError as problem:
            raise missing(
                "%s cannot keep its compiled %s in %s: %s. Set DSOPT_CACHE to a folder that can be written"
                % (self.module, self.what, cache, problem)
            ) from None

    def _compile(self, path: str, include: str, folder: "tempfile.TemporaryDirectory[str]") -> None:
        with folder as name:
            result = os.path.join(name, "result.so")
            common = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-I" + include]
            command = [*self._compiler(), *common, *self.flags, self.source, "-o", result, *self.libraries, "-ldl"]
            sys.stderr.write(
                "%s: compiling its %s for %s %s, which is kept as %s\n"
                % (self.module, self.what, self.framework, self.framework_version, path)
            )
            sys.stderr.flush()
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            except OSError as problem:
                raise missing("%s could not run the C++ compiler: %s" % (self.module, problem)) from None
            if done.returncode:
                raise missing(
                    "%s could not compile its %s for %s %s:\n%s\n%s"
                    % (
                        self.module,
                        self.what,
                        self.framework,
                        self.framework_version,
                        shlex.join(command),
                        done.stdout.decode("utf-8", "replace")[-4000:],
                    )
                )
            os.replace(result, path)
