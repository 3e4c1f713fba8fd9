"""sha256 of texts and files, and files that are hashed while they are written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK = 2**20


def sha256_of_text(text: str) -> str:
    """Return the sha256 of `text` in UTF-8, 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of the content of a file, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class HashedFile:
    """Write a new file and know its size and sha256 when it is closed."""

    def __init__(self, path: Path) -> None:
        """Create the file; it must not exist."""
        self.path = path
        self.num_bytes = 0
        self._stream = path.open("xb", buffering=_BLOCK)
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._stream.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def close(self) -> str:
        """Flush to the disk itself, close, and return the sha256 of the content."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without caring whether what is buffered still fits on the disk."""
        try:
            self._stream.close()
        except OSError:
            return
