"""Disks that are small, read-only or failing, for tests of files in which slices rest."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.core.errors import EnvironmentProblem


def mount(options: str, folder: Path) -> bool:
    """Mount a small file system in memory; False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return (
        shutil.which("mount") is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


@contextmanager
def mounted(options: str, folder: Path) -> Iterator[Path]:
    """Give a folder with a small file system of its own, or skip the test."""
    if not mount(options, folder):
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of the files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def descriptor_in(folder: Path) -> int:
    """Return the descriptor of the only file that this process has open in a folder."""
    links = {entry: Path("/proc/self/fd", entry) for entry in os.listdir("/proc/self/fd")}
    (found,) = (
        int(entry)
        for entry, link in links.items()
        if link.is_symlink() and str(link.readlink()).startswith(str(folder))
    )
    return found


def refused(rule: str, *words: object) -> pytest.RaisesExc[EnvironmentProblem]:
    """Expect an error of one rule whose message has all words."""
    return pytest.RaisesExc(
        EnvironmentProblem,
        check=lambda error: (
            error.rules == (rule,) and all(str(word) in error.problems[0].message for word in words)
        ),
    )
