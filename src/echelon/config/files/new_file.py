# SPDX-License-Identifier: Apache-2.0
"""Write a file or a folder that is not there yet: what a command makes for its user to keep."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

from echelon.core.disk import flush_file, flush_folder
from echelon.core.errors import ConfigError
from echelon.core.rulebook.config import CANNOT_WRITE, NEVER_OVERWRITE


def write_new(file: Path, content: str | bytes, *, key: str = "FILE") -> None:
    """Write a file, whole or not at all; ConfigError, with a free name, where there is one."""
    with _refused(file, key):
        _require_free(file)
        part = _beside(file)
        try:
            with part.open("xb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                flush_file(stream.fileno())
            _give_name(part, file)
        finally:
            part.unlink(missing_ok=True)


def require_writable(file: Path, *, key: str = "FILE") -> None:
    """Raise the ConfigError that `write_new` would, before the work for what is to be written."""
    with _refused(file, key):
        _require_free(file)
        part = _beside(file)
        part.open("xb").close()
        part.unlink()


def require_free_names(name: Path, ending: str, *, key: str = "FILE") -> None:
    """Refuse NAME.ending where a file NAME-PART.ending is there; ConfigError, with a free NAME."""
    stem = name.name.removesuffix(ending)
    if taken := next(_beginning_with(name.parent, stem, ending), None):
        number = 2
        while any(_beginning_with(name.parent, f"{stem}{number}", ending)):
            number += 1
        raise ConfigError(
            NEVER_OVERWRITE.problem(
                f"{taken} exists and is left as it is",
                key=key,
                suggestions=[f"{key} {name.parent / f'{stem}{number}{ending}'}"],
            )
        )


def make_folder(folder: Path, *, key: str = "FOLDER") -> None:
    """Make a folder; ConfigError, with a free name, where something is there."""
    with _refused(folder, key, is_folder=True):
        folder.mkdir(parents=True)


@contextmanager
def new_folder(folder: Path, *, key: str = "FOLDER") -> Generator[Path]:
    """Give a folder to write into that gets its name once it is whole; else nothing is left.

    ConfigError, with a free name, where something is there. What a process that was killed has left
    of a folder of this name is removed first (see `remove_parts`).
    """
    with _refused(folder, key, is_folder=True):
        _require_free(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_parts(folder)
        part = _beside(folder)
        part.mkdir()
    try:
        with holding(part) as held:
            if held:
                # From here on the name says whose part it is: a lock tells that somebody writes it.
                named = part.with_name(f"{part.name}-{_whose(folder)}")
                part.rename(named)
                part = named
            yield part
            with _refused(folder, key, is_folder=True):
                _require_free(folder)
                part.rename(folder)
                flush_folder(folder.parent)
    finally:
        rmtree(part, ignore_errors=True)


@contextmanager
def holding(part: Path) -> Generator[bool]:
    """Let nobody take a part of a folder for one that was left; tell whether that can be said.

    Every process that writes into the part holds it; one that ends, by whatever death, lets go.
    """
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove parts of a folder of this name that no process holds.

    Only those that were made since this machine started, on it: what processes of another one hold
    is not seen here. Others stay.
    """
    ours = re.compile(rf"\.echelon-[0-9a-f]{{16}}-{_whose(folder)}")
    beside: list[Path] = []
    with suppress(OSError):
        beside = [one for one in folder.parent.iterdir() if ours.fullmatch(one.name)]
    for part in beside:
        with suppress(OSError):
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _lock(descriptor, fcntl.LOCK_EX):
                    rmtree(part, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Return whether a lock was free, and is ours now; some file systems have none."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _whose(folder: Path) -> str:
    """Return what the name of a part says: which folder it becomes, and where.

    That is one machine since its start, and one mount: locks are told there alone.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        machine = secrets.token_hex(8)  # never the same: what is left stays
    mount = folder.parent.stat().st_dev
    return sha256(f"{folder.name}\0{machine}\0{mount}".encode()).hexdigest()[:16]


def _beginning_with(folder: Path, stem: str, ending: str) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name.startswith(f"{stem}-") and path.name.endswith(ending):
                yield path


def _require_free(file: Path) -> None:
    # A name that no file can have is told here, too.
    try:
        file.lstat()
    except FileNotFoundError:
        return
    raise FileExistsError


@contextmanager
def _refused(file: Path, key: str, *, is_folder: bool = False) -> Generator[None]:
    """Turn what the system refuses inside into a ConfigError."""
    try:
        yield
    except FileExistsError:
        # In the place of a file a folder is taken too: the name of a run file goes into it.
        free = free_name(file if is_folder or not file.is_dir() else file / "run.toml")
        problem = NEVER_OVERWRITE.problem(
            f"{file} exists and is left as it is", key=key, suggestions=[free]
        )
        raise ConfigError(problem) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = CANNOT_WRITE.problem(f"{file} cannot be written: {reason}", key=key)
        raise ConfigError(problem) from error


def _beside(file: Path) -> Path:
    return file.parent / f".echelon-{secrets.token_hex(8)}"


def _give_name(part: Path, file: Path) -> None:
    """Name a whole file, never in the place of another one."""
    try:
        os.link(part, file)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links: take the name first, then put the whole file there.
        file.open("xb").close()
        try:
            part.replace(file)
        except OSError:
            with suppress(OSError):
                file.unlink()
            raise


def free_name(path: Path) -> Path:
    """Return the first of NAME, NAME-2, NAME-3 ... that is not there yet; endings stay."""
    number = 2
    free = path
    while os.path.lexists(free):
        free = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return free
