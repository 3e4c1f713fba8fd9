"""The most memory that a call takes beyond what its process had: in a fork, so that each is fresh.

Two figures are read. The kernel keeps the high-water mark of the resident set (`VmHWM`), which is
set back before the call: no moment is missed, but pages of mapped files count in it. A thread
samples `RssAnon`, which is memory of the process alone, without mapped files. What is read by
`read` and `pread` stays in the page cache, which belongs to no process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SET_BACK = Path("/proc/self/clear_refs")
_SAMPLE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Say how many bytes a call took at most beyond those that were there before it."""

    resident: int
    """By the kernel's high-water mark: all of the resident set."""
    anonymous: int
    """Of them memory of the process alone, as it was sampled."""
    mapped: int
    """How much of it is of mapped files: libraries whose pages a fork touches again."""

    @property
    def own(self) -> int:
        """Return the most memory of the process alone, of which no moment was missed."""
        return self.resident - self.mapped


def status_bytes(name: str) -> int:
    """Return a figure of this process that the kernel tells."""
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def taken_by(prepare: Callable[[], Callable[[], object]]) -> Taken:
    """Run `prepare` and then what it returned in a fork of this process; measure the latter.

    RuntimeError with its traceback where it failed.
    """
    _give_back()
    return Taken(**json.loads(_said(lambda: json.dumps(asdict(_measured(prepare()))))))


def in_fork(call: Callable[[], object]) -> None:
    """Run something in a fork of this process, so that its memory is none of this one's."""
    _said(lambda: str(call()))


def _said(call: Callable[[], str]) -> str:
    """Return what a call in a fork returned; RuntimeError with its traceback where it failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said, status = call(), 0
        except BaseException:
            said, status = traceback.format_exc(), 1
        os.write(writer, said.encode()[-60_000:])
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        said = stream.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(said or "the process of a call was killed")
    return said


def _give_back() -> None:
    """Give back what the allocator keeps of what is freed, so that it is not used once more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _measured(call: Callable[[], object]) -> Taken:
    _give_back()
    _SET_BACK.write_text("5", encoding="ascii")
    before = {name: status_bytes(name) for name in ("VmRSS", "RssAnon", "RssFile")}
    most, done = [before["RssAnon"]], threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            most[0] = max(most[0], status_bytes("RssAnon"))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    call()
    resident, mapped = status_bytes("VmHWM"), status_bytes("RssFile")
    done.set()
    sampler.join()
    return Taken(
        resident=resident - before["VmRSS"],
        anonymous=most[0] - before["RssAnon"],
        mapped=mapped - before["RssFile"],
    )
