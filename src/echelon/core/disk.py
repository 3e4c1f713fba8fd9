# SPDX-License-Identifier: Apache-2.0
"""Files that must survive a kill or a power cut, and what a disk's refusals mean to a user."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import DISK_SPACE
from echelon.core.rulebook.run import DISK_WORKS, FOLDER_WRITABLE
from echelon.core.rules import Rule

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
_RULES: Mapping[int | None, Rule] = {
    **dict.fromkeys(NO_SPACE, DISK_SPACE),
    **dict.fromkeys(_NOT_WRITABLE, FOLDER_WRITABLE),
}


@contextmanager
def disk_errors(doing: str) -> Generator[None]:
    """Turn an OSError inside into an EnvironmentProblem: `doing` says what failed."""
    try:
        yield
    except OSError as error:
        raise explain_disk_error(error, doing) from error


def explain_disk_error(error: OSError, doing: str) -> EnvironmentProblem:
    """Return the error that a user reads when the disk refused `doing` (such as "to write X")."""
    rule = _RULES.get(error.errno, DISK_WORKS)
    reason = error.strerror or str(error)
    return EnvironmentProblem(rule.problem(f"the disk refused {doing}: {reason}"))


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk; FileExistsError where there is one."""
    with path.open("xb") as file:
        file.write(content)
        flush_file(file.fileno())


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of the content of a file, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_file(descriptor: int) -> None:
    """Return when what was written to an open file is on the disk."""
    os.fsync(descriptor)


def flush_folder(path: Path) -> None:
    """Return when the names in a folder (files made, renamed, removed) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_name(name: str) -> bool:
    """Return whether `name` is that of something in a folder, never of what is outside of it."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def list_names(path: Path, *, limit: int = 12) -> str:
    """Return what a folder holds, as part of a message: at most `limit` names."""
    if not path.is_dir():
        return f"{path} is no folder" if path.exists() else f"{path} does not exist"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
    if not names:
        return f"{path} is empty"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{path} holds {', '.join(names[:limit])}{more}"
