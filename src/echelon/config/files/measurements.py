# SPDX-License-Identifier: Apache-2.0
"""Measurements of a machine that are not all made yet: lines beside the file that is to be written.

The first line says which machine they are of, each other one is a measurement and its seconds,
written when it is made. A last line that was cut off, as the process was killed, is forgotten.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.cluster import CALIBRATION_CONTINUED
from echelon.core.rulebook.config import CANNOT_WRITE
from echelon.core.serialize import decode_json, to_json

SUFFIX = ".unfinished"
SCHEMA = 1  # of the lines


@dataclass(frozen=True, slots=True)
class Journal:
    """Write measurements into a file at once, each as one line; ranks of other processes too."""

    path: Path

    def append(self, name: str, seconds: float) -> None:
        """Write one measurement, named by `measurement_name`."""
        line = json.dumps({"measured": json.loads(name), "seconds": seconds}) + "\n"
        with self.path.open("a", encoding="ascii") as stream:
            stream.write(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedMeasurements:
    """Hold the seconds of what was measured before, by its name, and where more are written."""

    journal: Journal
    found: Mapping[str, float]

    def finish(self) -> None:
        """Remove the lines: what they say is in the file that was written."""
        self.journal.path.unlink(missing_ok=True)


def measurement_name(sample: object, **how: object) -> str:
    """Return one line of JSON that tells a measurement from all others."""
    entries = {"kind": type(sample).__name__, **to_json(sample), **how}
    return json.dumps(entries, sort_keys=True)


def unfinished_file(out: Path) -> Path:
    """Return where measurements stand until `out` is written."""
    out = out.absolute()
    return out.with_name(f"{out.name}{SUFFIX}")


@contextmanager
def unfinished_measurements(
    out: Path, machine: Mapping[str, object]
) -> Generator[UnfinishedMeasurements]:
    """Hold the unfinished measurements for `out` open, those of `machine`: no other process can.

    ConfigError where those that are there are of another machine, are none, or are being made. A
    file without any is removed at the end.
    """
    path = unfinished_file(out)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = error.strerror or str(error)
        problem = CANNOT_WRITE.problem(f"{path} cannot be written: {reason}", key="--out")
        raise ConfigError(problem) from error
    try:
        _lock(descriptor, path)
        found = _begin(descriptor, path, machine)
        try:
            yield UnfinishedMeasurements(journal=Journal(path), found=found)
        finally:
            if num_measurements(path) == 0:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def num_measurements(path: Path) -> int:
    """Return how many measurements are in a file of unfinished ones; 0 where there is none."""
    try:
        return max(0, path.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(_refused(path, "is being written by another calibration")) from None
    except OSError:
        return  # A file system without locks.


def _begin(descriptor: int, path: Path, machine: Mapping[str, object]) -> Mapping[str, float]:
    """Return what was measured before; write the first line where nothing was."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    head, *lines = whole.split(b"\n")
    wanted = cast("dict[str, object]", to_json(dict(machine)))
    if not head:
        os.ftruncate(descriptor, 0)
        first = {"schema": SCHEMA, "machine": wanted}
        os.pwrite(descriptor, (json.dumps(first) + "\n").encode("ascii"), 0)
        return {}
    try:
        first = decode_json(head)
        if first["schema"] != SCHEMA:
            raise ValueError(f"its schema is {first['schema']}")
        _require_same(path, first["machine"], wanted)
        read = [decode_json(line) for line in lines]
        found = {json.dumps(one["measured"], sort_keys=True): float(one["seconds"]) for one in read}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = _refused(path, f"is not one of unfinished measurements ({error})")
        raise ConfigError(problem) from error
    os.ftruncate(descriptor, len(whole) + 1)
    return found


def _require_same(path: Path, there: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    names = dict.fromkeys((*there, *wanted))
    differ = [name for name in names if there.get(name) != wanted.get(name)]
    if differ:
        parts = (f"{name} {there.get(name)} there, {wanted.get(name)} here" for name in differ)
        raise ConfigError(_refused(path, f"was begun otherwise: {'; '.join(parts)}"))


def _refused(path: Path, why: str) -> Problem:
    return CALIBRATION_CONTINUED.problem(
        f"{path.name} {why}",
        key="--out",
        set_by=str(path),
        suggestions=("another --out", f"rm {path}"),
    )
