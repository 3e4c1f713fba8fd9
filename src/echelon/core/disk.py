# SPDX-License-Identifier: Apache-2.0
"""Files that survive a kill or a power cut, the file of offloaded slices, refusals of a disk.

The file of slices has no name from the start (O_TMPFILE) or from the moment after, so that however
a process ends, nothing is left behind. Where the file system can, it is read and written past the
page cache (O_DIRECT): memory is bounded by our buffers, and an error comes back from the write that
it is of, not from a later one or from none. No torch here: a folder can be checked before a rank
starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.launch import DISK_SPACE
from echelon.core.rulebook.run import DISK_WORKS, FOLDER_WRITABLE
from echelon.core.rulebook.zero import (
    OFFLOAD_FILE_WORKS,
    OFFLOAD_FOLDER_EXISTS,
    OFFLOAD_FOLDER_WRITABLE,
    OFFLOAD_SPACE,
)
from echelon.core.rules import Rule
from echelon.core.units import binary_bytes

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


OFFLOAD_DIR_KEY = "zero.offload_dir"

_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR})
# A folder of /proc says "no such file" to whoever makes one.
_NO_FILES_IN = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_OFFLOAD_RULES: Mapping[int | None, Rule] = {
    **dict.fromkeys(NO_SPACE, OFFLOAD_SPACE),
    **dict.fromkeys(_NO_FILES_IN, OFFLOAD_FOLDER_WRITABLE),
}
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_RESERVE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NO_DIRECT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})

PAGE_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""What starts and sizes of transfers, in the file and in memory, are multiples of."""

_ZEROS_BYTES = 256 * PAGE_BYTES


def offload_folder_problems(folder: Path, num_bytes: int = 0) -> list[Problem]:
    """Return why files of `num_bytes` in all cannot lie in `folder`; nothing is left there."""
    try:
        descriptor = open_offload_file(folder, "this machine")
    except EnvironmentProblem as error:
        return list(error.problems)
    try:
        space = os.fstatvfs(descriptor)
    finally:
        os.close(descriptor)
    free = space.f_bavail * space.f_frsize
    if num_bytes <= free:
        return []
    return [
        OFFLOAD_SPACE.problem(
            f"the slices of the ranks of this machine take {binary_bytes(num_bytes)}, and "
            f"{folder} has {binary_bytes(free)} free",
            key=OFFLOAD_DIR_KEY,
        )
    ]


def open_offload_file(folder: Path, who: str) -> int:
    """Return the descriptor of a new file in `folder` that has no name; `who` will own it."""
    if problem := _missing(folder, who):
        raise EnvironmentProblem(problem)
    try:
        descriptor = _open_nameless(folder)
        try:
            _use_direct(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise explain_offload_error(error, folder, f"{who}: making a file") from error
    return descriptor


def _missing(folder: Path, who: str) -> Problem | None:
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return None
        what = "is not a folder"
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise explain_offload_error(error, folder, f"{who}: looking for a folder") from error
        what = "does not exist"
    return OFFLOAD_FOLDER_EXISTS.problem(
        f"{who}: {folder}, where slices are to rest, {what}", key=OFFLOAD_DIR_KEY
    )


def _open_nameless(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    descriptor, name = tempfile.mkstemp(prefix=".echelon-offload-", dir=folder)
    os.unlink(name)
    return descriptor


def _use_direct(descriptor: int) -> None:
    """Read and write a new file past the page cache, where a first page shows that this works."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(descriptor, [page], 0)
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def is_direct(descriptor: int) -> bool:
    """Return whether what is written to a file is on the disk when the write returns."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def round_up_to_pages(size: int) -> int:
    """Return the size of the pages that `size` bytes take."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def reserve(descriptor: int, start: int, size: int) -> None:
    """Give whole pages of a file their space on disk, as zeros; OSError where there is none."""
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, start, size)
            return
        except OSError as error:
            if error.errno not in _NO_RESERVE:
                raise
    with mmap.mmap(-1, min(size, _ZEROS_BYTES)) as zeros, memoryview(zeros) as view:
        for position in range(start, start + size, len(view)):
            with view[: start + size - position] as part:
                write_all(descriptor, part, position)


def read_all(descriptor: int, into: memoryview, start: int) -> None:
    """Fill `into` from a file; OSError where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at byte {start + done}")
        done += count


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all of `data` into a file."""
    done = 0
    while done < len(data):
        done += os.pwritev(descriptor, [data[done:]], start + done)


def explain_offload_error(error: OSError, folder: Path, doing: str) -> EnvironmentProblem:
    """Return what a user reads when the disk refused `doing` (such as "rank 2: to read X")."""
    rule = _OFFLOAD_RULES.get(error.errno, OFFLOAD_FILE_WORKS)
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    reason = f"{error.strerror or error} ({name})"
    if rule is OFFLOAD_SPACE:
        with contextlib.suppress(OSError):
            space = os.statvfs(folder)
            reason += f"; {binary_bytes(space.f_bavail * space.f_frsize)} are free there"
    return EnvironmentProblem(
        rule.problem(f"{doing} in {folder} failed: {reason}", key=OFFLOAD_DIR_KEY)
    )
