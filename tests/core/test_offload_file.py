"""The nameless file of slices: what is written is read, no name is left, and errors say why."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from echelon.core.disk import (
    PAGE_BYTES,
    explain_offload_error,
    offload_folder_problems,
    open_offload_file,
    read_all,
    reserve,
    round_up_to_pages,
    write_all,
)
from echelon.core.errors import EnvironmentProblem


def test_sizes_are_whole_pages() -> None:
    assert [round_up_to_pages(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [
        0,
        PAGE_BYTES,
        PAGE_BYTES,
        2 * PAGE_BYTES,
    ]


def test_pages_are_reserved_as_zeros_and_read_as_they_were_written(tmp_path: Path) -> None:
    descriptor = open_offload_file(tmp_path, "rank 0")
    try:
        assert list(tmp_path.iterdir()) == []
        reserve(descriptor, 0, 0)
        reserve(descriptor, 0, 2 * PAGE_BYTES)
        assert os.fstat(descriptor).st_size == 2 * PAGE_BYTES
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            view[:3] = b"abc"
            write_all(descriptor, view, PAGE_BYTES)
            read_all(descriptor, view, 0)
            assert view[:3] == b"\0\0\0"
            read_all(descriptor, view, PAGE_BYTES)
            assert view[:3] == b"abc"
            with pytest.raises(OSError, match=f"the file ends at byte {2 * PAGE_BYTES}"):
                read_all(descriptor, view, 2 * PAGE_BYTES)
    finally:
        os.close(descriptor)


def test_a_folder_is_there_and_has_room(tmp_path: Path) -> None:
    assert offload_folder_problems(tmp_path, 1) == []
    (gone,) = offload_folder_problems(tmp_path / "gone")
    assert (gone.rule, gone.key) == ("offload-folder-exists", "zero.offload_dir")
    assert gone.message.endswith("does not exist")
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="is not a folder"):
        open_offload_file(tmp_path / "file", "rank 0")
    (full,) = offload_folder_problems(tmp_path, 2**62)
    assert full.rule == "offload-space"


@pytest.mark.parametrize(
    ("number", "rule"),
    [
        (errno.ENOSPC, "offload-space"),
        (errno.EROFS, "offload-folder-writable"),
        (errno.EIO, "offload-file-works"),
    ],
)
def test_an_error_is_told_by_what_mends_it(tmp_path: Path, number: int, rule: str) -> None:
    found = explain_offload_error(OSError(number, "why"), tmp_path, "rank 2: to read")
    assert found.rules == (rule,)
    name = errno.errorcode[number]
    assert f"rank 2: to read in {tmp_path} failed: why ({name})" in found.problems[0].message
    assert ("are free there" in found.problems[0].message) is (rule == "offload-space")
