# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in files, and in objects that read and write like a binary file."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref
from typing import Any, List, Tuple

from . import _abi as abi
from ._arrays import refuse
from ._errors import ArgumentTypeError
from ._hooks import guarded

_KINDS = dict(abi.dsopt_io._fields_)
_BYTES = (bytes, bytearray, memoryview)


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, bytes, os.PathLike))


def _require(file: Any, *methods: str) -> None:
    for method in methods:
        if not callable(getattr(file, method, None)):
            refuse(
                "file",
                "is %s, which is neither a path nor a binary file: it has no %s" % (type(file).__name__, method),
                kind=ArgumentTypeError,
            )


def _failed(problem: BaseException) -> int:
    return getattr(problem, "errno", None) or 5  # EIO


def _wrong(text: str) -> ArgumentTypeError:
    return ArgumentTypeError(text, abi.DSOPT_ERR_ARGUMENT, "DSOPT_ERR_ARGUMENT")


def _kind(part: Any) -> str:
    return "%d bytes" % memoryview(part).nbytes if isinstance(part, _BYTES) else type(part).__name__


def _path(file: Any) -> bytes:
    try:
        path = os.fsencode(file)
    except UnicodeEncodeError as problem:
        refuse("file", "is %a: %s" % (file, problem))
    if b"\0" in path:
        refuse("file", "is %r, in which there is a NUL" % (file,))
    return path


def save(optimizer: Any, file: Any, flags: int) -> None:
    if _is_path(file):
        io = abi.dsopt_io(flags=flags)
        abi.check(abi.lib.dsopt_optimizer_save(optimizer.handle, _path(file), byref(io)))
        return
    _require(file, "write")

    def write(_user: Any, data: int, size: int) -> int:
        # Released at the end: a file that keeps the view must not access the memory after it was reused.
        with memoryview((ctypes.c_char * size).from_address(data)) as memory, memory.toreadonly() as all_of_it:
            place = 0
            while place < size:
                with all_of_it[place:] as left:
                    done = file.write(left)
                if done is None and not hasattr(file, "fileno"):  # returning None means all was written
                    break
                if not done:
                    raise BlockingIOError("the file accepted none of %d bytes" % (size - place))
                if not isinstance(done, int) or not 0 < done <= size - place:
                    raise _wrong("file.write returned %r, and was given %d bytes" % (done, size - place))
                place += done
        return 0

    io = abi.dsopt_io(flags=flags, write=_KINDS["write"](guarded(write, _failed)))
    abi.check(abi.lib.dsopt_optimizer_save(optimizer.handle, None, byref(io)))


def load(optimizer: Any, file: Any, flags: int) -> None:
    if _is_path(file):
        io = abi.dsopt_io(flags=flags)
        abi.check(abi.lib.dsopt_optimizer_load(optimizer.handle, _path(file), byref(io)))
        return
    files = list(file) if isinstance(file, (list, tuple)) else None
    if files == []:
        refuse("file", "is an empty list")
    if files and all(map(_is_path, files)):
        paths = (ctypes.c_char_p * len(files))(*map(_path, files))
        io = abi.dsopt_io(flags=flags, files=len(files), paths=ctypes.addressof(paths))
        abi.check(abi.lib.dsopt_optimizer_load(optimizer.handle, None, byref(io)))
        return
    _from_objects(optimizer, [file] if files is None else files, files is not None, flags)


def _from_objects(optimizer: Any, files: List[Any], several: bool, flags: int) -> None:
    for file in files:
        _require(file, "read", "seek", "tell")
    begins_and_sizes: List[Tuple[int, int]] = []
    for file in files:
        begin = file.tell()
        file.seek(0, os.SEEK_END)  # some objects return None
        end = file.tell()
        if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
            raise _wrong("file.tell returned %r at the current position and %r at the end" % (begin, end))
        begins_and_sizes.append((begin, end - begin))

    def read(user: Any, offset: int, data: int, size: int) -> int:
        which = (user or 1) - 1
        file, (begin, _) = files[which], begins_and_sizes[which]
        file.seek(begin + offset)
        done = 0
        into = memoryview((ctypes.c_char * size).from_address(data)).cast("B")
        while done < size:
            part = file.read(size - done)
            if part is None or isinstance(part, _BYTES) and not len(part):
                raise EOFError("the file ends %d bytes early" % (size - done))
            if not isinstance(part, _BYTES) or memoryview(part).nbytes > size - done:
                text = "file.read(%d) returned %s, and must return so many bytes at most"
                raise _wrong(text % (size - done, _kind(part)))
            part = memoryview(part).cast("B")
            into[done : done + len(part)] = part
            done += len(part)
        return 0

    io = abi.dsopt_io(
        flags=flags, read=_KINDS["read"](guarded(read, _failed)), user=1, total=begins_and_sizes[0][1] if files else 0
    )
    if several:
        users = (ctypes.c_void_p * len(files))(*range(1, len(files) + 1))
        totals = (ctypes.c_uint64 * len(files))(*(size for _, size in begins_and_sizes))
        io.files, io.users, io.totals = len(files), ctypes.addressof(users), ctypes.addressof(totals)
    abi.check(abi.lib.dsopt_optimizer_load(optimizer.handle, None, byref(io)))
