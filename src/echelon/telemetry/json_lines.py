# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines: one object to a line, appended, readable up to the last whole line.

A file whose name ends in .gz is compressed: each flush adds a gzip member of whole lines, so that
`zcat` reads the file while it grows. A place in such a file is one number: the place of the member
in the file * 2^32 + the place of the line in the member.

A kill leaves half a line, or half a member, at the end of a file, which is skipped. Anything else
that cannot be read was changed or damaged after the run wrote it: a line that is no object, a value
that is missing or of another kind, a file that does not open. Each is the rule `events-readable`,
with file and line.
"""

from __future__ import annotations

import gzip
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, cast

from echelon.core.disk import disk_errors
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.rulebook.run import EVENTS_READABLE
from echelon.core.serialize import from_json


class JsonLines:
    """Append objects to a file: buffered until `flush`, then written at once.

    A kill can leave half a line at the end of the file, or half a member of a compressed one;
    opening it to append cuts that off.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append to it; EnvironmentProblem where the disk refuses."""
        self.path = path
        self._lines: list[str] = []
        with disk_errors(f"to open {path}"):
            path.touch()
            (_cut_half_member if _is_compressed(path) else cut_half_line)(path)
            self._file = path.open("ab", buffering=0)

    def add(self, entry: Mapping[str, object]) -> None:
        """Keep one object for the next `flush`; a NaN or infinity in it becomes null."""
        finite = {key: _finite(value) for key, value in entry.items()}
        self._lines.append(json.dumps(finite, allow_nan=False, separators=(",", ":")) + "\n")

    def flush(self) -> int:
        """Write what was added since the last time; return the bytes that it takes in the file."""
        if not self._lines:
            return 0
        text = "".join(self._lines).encode()
        packed = gzip.compress(text, _LEVEL, mtime=0) if _is_compressed(self.path) else text
        data = memoryview(packed)
        self._lines.clear()
        with disk_errors(f"to write {self.path}"):
            while data:
                data = data[self._file.write(data) :]
        return len(packed)

    def close(self) -> None:
        """Write what is left; nothing can be added after."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def cut_half_line(path: Path) -> None:
    """Cut off what follows the last newline of a file."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)


def _is_compressed(path: Path) -> bool:
    return path.suffix == ".gz"


def _cut_half_member(path: Path) -> None:
    """Cut off what follows the last whole member of a file; a damaged file stays as it is."""
    end = 0
    try:
        for member in _members(path):
            end = member.end
    except zlib.error:
        return
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) != end:
            file.truncate(end)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Whole lines of a file, and the place of the first line. A plain file is one part."""

    place: int
    text: bytes | mmap.mmap


@dataclass(frozen=True, slots=True)
class _Member:
    begin: int
    end: int
    text: bytes


def _members(path: Path, begin: int = 0) -> Iterator[_Member]:
    """Yield the whole members of a compressed file; zlib.error for a damaged member."""
    with path.open("rb") as file:
        place = file.seek(begin)
        unpack, parts, remaining, size = zlib.decompressobj(wbits=_GZIP), list[bytes](), b"", 0
        while block := remaining or file.read(_BLOCK):
            parts.append(unpack.decompress(block))
            remaining, size = unpack.unused_data, size + len(parts[-1])
            if size > _LARGEST_MEMBER:
                raise zlib.error(f"more than {_LARGEST_MEMBER} bytes of text")
            if unpack.eof:
                end = file.tell() - len(remaining)
                yield _Member(place, end, b"".join(parts))
                place, unpack = end, zlib.decompressobj(wbits=_GZIP)
                parts, size = [], 0


def text_parts(path: Path, begin: int = 0) -> Iterator[TextPart]:
    """Yield the lines of a file from a place on, part by part; ConfigError for a damaged one."""
    if not _is_compressed(path):
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END):
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    yield TextPart(0, text)
        return
    read = begin >> _SHIFT
    try:
        for member in _members(path, read):
            yield TextPart(member.begin << _SHIFT, member.text)
            read = member.end
    except zlib.error as error:
        why = f"the gzip member at byte {read} is damaged ({error})"
        raise unreadable_file_error(path, why) from error


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_LEVEL = 6
"""Level of compression: a step of a hundred events takes 2 ms."""
_BLOCK = 1 << 16  # bytes
_SHIFT = 32  # bits
_LARGEST_MEMBER = 1 << 30  # bytes
_GZIP = 16 + zlib.MAX_WBITS
"""Window bits of zlib for members with a gzip header."""
_SHOWN = 60
"""As many characters of a line are shown as tell it from others."""

_LONGEST_S = 1e9
"""No run lasts thirty years: what is beyond was not written by a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """Hold the object of one line; `place` is where the line begins in its file, in bytes."""

    path: Path
    place: int
    values: Mapping[str, Any]

    def text(self, key: str) -> str:
        """Return a text; ConfigError where it is none."""
        return self._checked(key, "text", lambda value: isinstance(value, str))

    def whole(self, key: str) -> int:
        """Return a whole number; ConfigError where it is none."""
        return self._checked(key, "whole number", _is_whole)

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """Return whole numbers, of which there are some; ConfigError where they are none."""

        def fits(value: Any) -> bool:
            items = cast("list[object]", value) if isinstance(value, list) else []
            return bool(items) and all(map(_is_whole, items))

        return tuple(self._checked(key, "list of whole numbers", fits))

    def number(self, key: str) -> float | None:
        """Return a number, None where it was not finite; ConfigError where it is neither."""
        value = self._checked(
            key, "number", lambda v: v is None or type(v) is float or _is_whole(v)
        )
        return value if value is None or math.isfinite(value) else None

    def event(self, rank: int) -> Event:
        """Return the line as an event of `rank`; ConfigError where it is none."""
        try:
            event = from_json(Event, self.values)
        except ValueError as error:
            raise self._misfit(f"is no event: {error}") from error
        if event.rank != rank:
            raise self._misfit(f"is an event of rank {event.rank} in the file of rank {rank}")
        if not -_LONGEST_S < event.start <= event.end < _LONGEST_S:
            raise self._misfit(f"is no event: it lasts from {event.start} s to {event.end} s")
        return event

    def _checked(self, key: str, what: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.values:
            raise self._misfit(f"has no {key}")
        if not fits(self.values[key]):
            raise self._misfit(f"{key} = {self.values[key]!r:.{_SHOWN}} is no {what}")
        return self.values[key]

    def _misfit(self, why: str) -> ConfigError:
        return unreadable_file_error(self.path, why, place=self.place)


def read_entries(path: Path, begin: int = 0, end: int | None = None) -> Iterator[LogEntry]:
    """Yield the lines of a file from one place to another, in bytes, as far as they are whole.

    Nothing where there is no file. ConfigError where it, or a line of it, cannot be read.
    """
    try:
        for place, line in _lines(path, begin):
            if end is not None and place >= end:
                return
            yield LogEntry(path=path, place=place, values=_values(line, path, place))
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable_file_error(path, os_error_text(error)) from error


def _lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the place and the bytes of each whole line from `begin` on."""
    if _is_compressed(path):
        for part in text_parts(path, begin):
            place = part.place
            for line in BytesIO(part.text):
                if place >= begin:
                    yield place, line
                place += len(line)
        return
    with path.open("rb") as file:
        place = file.seek(begin)
        while (line := file.readline()).endswith(b"\n"):
            yield place, line
            place += len(line)


def end_of_whole_lines(path: Path, begin: int) -> int:
    """Return where the last whole line ends, in bytes; `begin` where there is none after it."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return begin + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return begin
    except OSError as error:
        raise unreadable_file_error(path, os_error_text(error)) from error


def last_of_each_step(entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Return entries in the order of their steps, without those that a resumed run took again.

    A run that was killed at step 730 and resumed from step 500 writes steps 501 to 730 twice.
    """
    kept: dict[int, LogEntry] = {}
    for entry in entries:
        step = entry.whole("step")
        while kept and next(reversed(kept)) >= step:
            kept.popitem()
        kept[step] = entry
    return list(kept.values())


def unreadable_file_error(path: Path, why: str, *, place: int | None = None) -> ConfigError:
    """Return the error that says why a file, or its line at `place`, cannot be read."""
    where = "" if place is None else f" line {_line_at(path, place)}"
    return ConfigError(EVENTS_READABLE.problem(f"{path}{where}: {why}"))


def os_error_text(error: OSError) -> str:
    """Return what the system says of a file that it does not give, as part of a message."""
    return f"it cannot be read: {error.strerror or error}"


def _is_whole(value: object) -> bool:
    """Return whether a value is a whole number that a count can have; no count is longer."""
    return type(value) is int and abs(value) < 2**63


def _values(line: bytes, path: Path, place: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line, parse_constant=_refuse)
        if not isinstance(found, dict):
            raise ValueError("it is JSON, and no object")
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN].decode("ascii", errors="replace").strip()
        raise unreadable_file_error(
            path, f"{shown!r} is no entry ({error})", place=place
        ) from error
    return cast("Mapping[str, Any]", found)


def _refuse(constant: str) -> NoReturn:
    """Refuse what is no JSON: NaN and infinity are written as null."""
    raise ValueError(f"{constant} is no number")


def _line_at(path: Path, place: int) -> int:
    """Return which line begins at a place, counted from 1: the file was just read up to there."""
    if _is_compressed(path):
        return 1 + sum(1 for at, _ in _lines(path) if at < place)
    newlines = 0
    with suppress(OSError), path.open("rb") as file:
        while place > 0 and (part := file.read(min(place, 1 << 20))):
            newlines += part.count(b"\n")
            place -= len(part)
    return newlines + 1
