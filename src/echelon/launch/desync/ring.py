# SPDX-License-Identifier: Apache-2.0
"""The ring of a rank's last fingerprints: a file that is mapped as memory, so it outlives the rank.

A write is a store into memory, never a system call. Texts (names, shapes, lines of code) are kept
once, in a table behind the ring, and a fingerprint has their numbers.

    head     256 bytes   what the rank waits in, and how many fingerprints there have been
    slots    64 bytes each, for the last SLOTS operations
    table    texts, each behind its length

A table that is full takes the ring's first bytes away: nothing is told then, rather than something
wrong. A reader that comes while the rank writes may find a slot that is half new: slots hold their
own number, and those that may have been written meanwhile are left out.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.launch.desync.fingerprint import Fingerprint

SLOTS = 512
"""How many operations a ring holds."""
_PREFIX = "echelon-calls-"
_MAGIC = b"echelon calls 1\n"
_HEAD_BYTES = 256
_SLOT = struct.Struct("<QdIIIIIIIiiB")
_SLOT_BYTES = 64
_COUNT, _COUNT_AT = struct.Struct("<Q"), 64
_WAIT, _WAIT_AT = struct.Struct("<Qdi"), 72
_TABLE_END, _TABLE_END_AT = struct.Struct("<Q"), 96
_DOING, _DOING_AT = struct.Struct("<B100s"), 128
_LENGTH = struct.Struct("<I")
_ENDED_OFFSET = _SLOT.size - 1
_TABLE_AT = _HEAD_BYTES + SLOTS * _SLOT_BYTES
_TABLE_BYTES = 1 << 19
RING_BYTES = _TABLE_AT + _TABLE_BYTES
"""What a ring takes of the host's memory, all of it from the start: 544 KiB."""
_NOT_KEPT = 0
"""The number of an empty text, and of one that the table had no room for."""
DEVICE_READ = (1 << 64) - 1
"""What a rank waits for, in place of a number, whose host reads a value of its device."""


Fields = tuple[int, int, int, int, int, int, int, int, int]
"""Group, sequence number, kind, name, tensor, line, task, and the two ends of a message (-1: none).

All but the sequence number and the ends are numbers of texts.
"""


def ring_path(folder: Path, job: int, rank: int) -> Path:
    """Return where a rank keeps the ring of a job."""
    return folder / f"calls-{job}-rank-{rank:04d}"


@contextlib.contextmanager
def ring_folder() -> Iterator[Path]:
    """Hold a folder for rings open, in memory where the system has such a place for files.

    On a disk a store would now and then wait for pages that are being written back.
    """
    with tempfile.TemporaryDirectory(prefix=_prefix(), dir=_home()) as folder:
        yield Path(folder)


def new_ring(rank: int) -> FingerprintRing:
    """Return a ring of a rank that nobody supervises, in a folder of its own: see `remove_ring`."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_home()))
    return FingerprintRing(ring_path(folder, 0, rank))


def remove_ring(path: Path) -> None:
    """Remove a ring that `new_ring` made, and its folder; one that is gone is none."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def _prefix() -> str:
    # Whose folder it is can be seen, when a process was killed before it could remove it.
    return f"{_PREFIX}{os.getpid()}-"


def _home() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingContents:
    """Hold what a ring said at one time."""

    fingerprints: tuple[Fingerprint, ...]
    """The last operations, oldest first."""
    waits_for: int | None
    """The number of the operation that the rank waits in."""
    waits_since: float
    """Since when, on the monotonic clock of its host."""
    awaits: int | None
    """The member whose message it waits for, where that is known."""
    doing: str = ""
    """What the rank was last at: a step, a checkpoint."""


NOTHING = RingContents(fingerprints=(), waits_for=None, waits_since=0.0, awaits=None)


class FingerprintRing:
    """Write the fingerprints of one rank; only its own threads do."""

    def __init__(self, path: Path) -> None:
        """Make the file, which must not be there yet; OSError where there is no room for it."""
        size = RING_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserved now: a store where the file system has no room would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.path = path
        self._texts: dict[str, int] = {"": _NOT_KEPT}
        self._joined: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._table_end = _TABLE_AT
        self._count = 0
        _TABLE_END.pack_into(self._memory, _TABLE_END_AT, self._table_end)
        self._memory[: len(_MAGIC)] = _MAGIC

    def text(self, text: str) -> int:
        """Return the number of a text, which is written into the table the first time."""
        found = self._texts.get(text)
        if found is None:
            found = self._write_text(text)
            if found != _NOT_KEPT:
                self._texts[text] = found
        return found

    def joined(self, name: str, ranks: tuple[int, ...]) -> str:
        """Return what a communicator is called that is new here: no two of a run have one name."""
        self._joined[name, ranks] += 1
        number = self._joined[name, ranks]
        return name if number == 1 else f"{name}, number {number}"

    def group(self, name: str, axis: str, ranks: Sequence[int]) -> int:
        """Return the number of a communicator as called over an axis."""
        return self.text(json.dumps([name, axis, _runs(ranks)]))

    def tensor(self, shape: Sequence[int], dtype: str) -> int:
        """Return the number of a shape and a dtype."""
        return self.text(json.dumps([list(shape), dtype]))

    def issue(self, fields: Fields) -> int:
        """Write a fingerprint, and return its number."""
        number = self._count + 1
        slot = _HEAD_BYTES + (number - 1) % SLOTS * _SLOT_BYTES
        _SLOT.pack_into(self._memory, slot, number, time.monotonic(), *fields, 0)
        self._count = number
        _COUNT.pack_into(self._memory, _COUNT_AT, number)
        return number

    def mark(self, doing: str) -> None:
        """Say what the rank is at now."""
        data = doing.encode()[:100]
        _DOING.pack_into(self._memory, _DOING_AT, len(data), data)

    def wait(self, number: int) -> None:
        """Say that the rank now waits in operation `number`."""
        _WAIT.pack_into(self._memory, _WAIT_AT, number, time.monotonic(), -1)

    def read_device(self) -> None:
        """Say that the host now waits for its device, which may wait in any operation."""
        self.wait(DEVICE_READ)

    def awaits(self, number: int, member: int, since: float) -> None:
        """Say for whose message it waits in operation `number`."""
        _WAIT.pack_into(self._memory, _WAIT_AT, number, since, member)

    def go_on(self, ended: int) -> None:
        """Say that the wait is over; operation `ended` has ended, unless it is 0."""
        _WAIT.pack_into(self._memory, _WAIT_AT, 0, 0.0, -1)
        if ended > self._count - SLOTS and ended > 0:
            slot = _HEAD_BYTES + (ended - 1) % SLOTS * _SLOT_BYTES
            self._memory[slot + _ENDED_OFFSET] = 1

    def _write_text(self, text: str) -> int:
        data = text.encode()
        end = self._table_end + _LENGTH.size + len(data)
        if end > len(self._memory):
            self._memory[: len(_MAGIC)] = bytes(len(_MAGIC))
            return _NOT_KEPT
        start, self._table_end = self._table_end, end
        _LENGTH.pack_into(self._memory, start, len(data))
        self._memory[start + _LENGTH.size : end] = data
        _TABLE_END.pack_into(self._memory, _TABLE_END_AT, end)
        return start


class RingReader:
    """Read the ring of another process, whether it lives or not."""

    def __init__(self, path: Path) -> None:
        """Open the file; OSError where it cannot be."""
        self._descriptor = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def wait(self) -> tuple[int, float]:
        """Return the number of the operation that the rank waits in, and since when; 0 of none."""
        data = os.pread(self._descriptor, _WAIT.size, _WAIT_AT)
        if len(data) < _WAIT.size:
            return 0, 0.0
        number, since, _ = _WAIT.unpack(data)
        return number, since

    def read(self, most: int = SLOTS) -> RingContents:
        """Return the last operations, at most so many, and what the rank waits in."""
        head = os.pread(self._descriptor, _HEAD_BYTES, 0)
        if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
            return NOTHING
        slots = os.pread(self._descriptor, SLOTS * _SLOT_BYTES, _HEAD_BYTES)
        after = os.pread(self._descriptor, _HEAD_BYTES, 0)
        (table_end,) = _TABLE_END.unpack_from(after, _TABLE_END_AT)
        table = os.pread(self._descriptor, table_end - _TABLE_AT, _TABLE_AT)
        (count,) = _COUNT.unpack_from(head, _COUNT_AT)
        (count_after,) = _COUNT.unpack_from(after, _COUNT_AT)
        # The rank may be in the middle of the operation after the last one that it has counted.
        first = max(1, count_after - SLOTS + 2, count - most + 1)
        number, since, member = _WAIT.unpack_from(head, _WAIT_AT)
        length, doing = _DOING.unpack_from(after, _DOING_AT)
        texts = _Texts(table)
        found = (_fingerprint(slots, one, texts) for one in range(first, count + 1))
        return RingContents(
            fingerprints=tuple(one for one in found if one is not None),
            waits_for=number or None,
            waits_since=since,
            awaits=None if member < 0 else member,
            doing=doing[:length].decode("utf-8", "replace"),
        )


class _Texts:
    """Look texts up in a table that was read."""

    def __init__(self, table: bytes) -> None:
        self._table = table
        self._groups: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        self._tensors: dict[int, tuple[tuple[int, ...], str]] = {}

    def text(self, place: int) -> str:
        if place == _NOT_KEPT:
            return ""
        start = place - _TABLE_AT
        (length,) = _LENGTH.unpack_from(self._table, start)
        return self._table[start + _LENGTH.size : start + _LENGTH.size + length].decode()

    def group(self, place: int) -> tuple[str, str, tuple[int, ...]]:
        if place not in self._groups:
            name, axis, runs = json.loads(self.text(place) or '["", "", []]')
            ranks = tuple(rank for start, stop, step in runs for rank in range(start, stop, step))
            self._groups[place] = (name, axis, ranks)
        return self._groups[place]

    def tensor(self, place: int) -> tuple[tuple[int, ...], str]:
        if place not in self._tensors:
            shape, dtype = json.loads(self.text(place) or '[[], ""]')
            self._tensors[place] = (tuple(shape), dtype)
        return self._tensors[place]


def _fingerprint(slots: bytes, number: int, texts: _Texts) -> Fingerprint | None:
    (written, at, group, sequence, kind, name, tensor, site, task, source, target, ended) = (
        _SLOT.unpack_from(slots, (number - 1) % SLOTS * _SLOT_BYTES)
    )
    if written != number:
        return None
    communicator, axis, ranks = texts.group(group)
    shape, dtype = texts.tensor(tensor)
    return Fingerprint(
        number=number,
        group=communicator,
        axis=axis,
        ranks=ranks,
        sequence=sequence,
        kind=texts.text(kind),
        name=texts.text(name),
        shape=shape,
        dtype=dtype,
        ends=None if source < 0 else (source, target),
        site=texts.text(site),
        task=texts.text(task),
        ended=bool(ended),
        issued_at=at,
    )


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as ranges: thousands of them in a regular mesh are a few numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        last = runs[-1] if runs else None
        if last is not None and last[1] - last[2] == last[0] and rank > last[0]:
            runs[-1] = [last[0], rank + 1, rank - last[0]]  # the second rank says how far apart
        elif last is not None and rank == _next(last):
            last[1] = rank + 1
        else:
            runs.append([rank, rank + 1, 1])
    return runs


def _next(run: Sequence[int]) -> int:
    start, stop, step = run
    return start + ((stop - 1 - start) // step + 1) * step
