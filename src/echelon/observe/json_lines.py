"""Write files of JSON lines: one object to a line, appended, readable up to the last whole line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from echelon.core.disk import disk_errors


class JsonLines:
    """Append objects to a file: buffered until `flush`, then written at once.

    A kill can leave half a line at the end of the file; opening it to append cuts that off.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append to it; EnvironmentProblem where the disk refuses."""
        self.path = path
        self._lines: list[str] = []
        with disk_errors(f"to open {path}"):
            path.touch()
            cut_half_line(path)
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> JsonLines:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write what is left, and close."""
        self.close()

    def add(self, entry: Mapping[str, object]) -> None:
        """Keep one object for the next `flush`; a NaN or infinity in it becomes null."""
        finite = {key: _finite(value) for key, value in entry.items()}
        self._lines.append(json.dumps(finite, allow_nan=False, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Write what was added since the last time."""
        if not self._lines:
            return
        data = memoryview("".join(self._lines).encode())
        self._lines.clear()
        with disk_errors(f"to write {self.path}"):
            while data:
                data = data[self._file.write(data) :]

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


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
