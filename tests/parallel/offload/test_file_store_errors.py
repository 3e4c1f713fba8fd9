"""What a disk refuses is told by rule, rank, path and errno, at once or at the next call."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from echelon.core.disk import PAGE_BYTES, offload_folder_problems
from echelon.parallel.offload.file_store import FileOffloadStore
from tests.parallel.offload.disks import descriptor_in, largest_file, mounted, refused

PUNCH_HOLE_KEEP_SIZE = 0x03


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with refused("offload-folder-exists", "rank 3", missing, "does not exist"):
        FileOffloadStore(missing, 3, 2)
    assert not missing.exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with refused("offload-folder-exists", file, "is not a folder"):
        FileOffloadStore(file, 0, 2)
    with refused("offload-folder-exists", "does not exist"):
        FileOffloadStore(file / "below", 0, 2)


def test_a_folder_of_the_system_that_takes_no_files() -> None:
    with refused("offload-folder-writable", "rank 1", "/proc"):
        FileOffloadStore(Path("/proc"), 1, 2)


def test_a_folder_that_is_mounted_read_only(tmp_path: Path) -> None:
    with mounted("ro", tmp_path), refused("offload-folder-writable", tmp_path, "EROFS"):
        FileOffloadStore(tmp_path, 0, 2)


def test_a_folder_is_judged_before_any_rank_starts(tmp_path: Path) -> None:
    assert offload_folder_problems(tmp_path, 100 * PAGE_BYTES) == []
    assert list(tmp_path.iterdir()) == []
    (problem,) = offload_folder_problems(tmp_path / "missing")
    assert (problem.rule, problem.key) == ("offload-folder-exists", "zero.offload_dir")
    (problem,) = offload_folder_problems(tmp_path, 2**60)
    assert problem.rule == "offload-space"
    assert "1024.00 PiB" in problem.message


def test_a_disk_that_is_full_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    with (
        mounted(f"size={16 * PAGE_BYTES}", tmp_path),
        closing(FileOffloadStore(tmp_path, 2, 2)) as rest,
    ):
        rest.add("a", 8 * PAGE_BYTES, torch.uint8)
        with refused("offload-space", "rank 2", tmp_path, "ENOSPC", "are free there"):
            rest.add("b", 16 * PAGE_BYTES, torch.uint8)


def test_a_limit_on_files_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    with (
        largest_file(4 * PAGE_BYTES),
        closing(FileOffloadStore(tmp_path, 2, 2)) as rest,
        refused("offload-space", "rank 2", tmp_path, "EFBIG"),
    ):
        rest.add("b", 5 * PAGE_BYTES, torch.uint8)


def test_a_disk_that_cannot_reserve_is_filled_with_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with (
        mounted(f"size={700 * PAGE_BYTES}", tmp_path),
        closing(FileOffloadStore(tmp_path, 2, 2)) as rest,
    ):
        rest.add("a", 300 * PAGE_BYTES + 1, torch.uint8)
        assert not rest.view("a").any()
        with refused("offload-space", "ENOSPC"):
            rest.add("b", 400 * PAGE_BYTES, torch.uint8)


def test_a_disk_that_is_full_when_written_to(tmp_path: Path) -> None:
    with (
        mounted(f"size={16 * PAGE_BYTES}", tmp_path),
        closing(FileOffloadStore(tmp_path, 2, 2)) as rest,
    ):
        rest.add("a", 8 * PAGE_BYTES, torch.uint8)
        # What was reserved is taken away, as by a file system that promised more than it has.
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
        size = ctypes.c_int64(8 * PAGE_BYTES)
        descriptor = descriptor_in(tmp_path)
        assert fallocate(descriptor, PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), size) == 0
        space = os.statvfs(tmp_path)
        (tmp_path / "other").write_bytes(bytes(space.f_bavail * space.f_frsize))
        rest.put(["a"], rest.fetch(["a"], read=False).wait())
        with refused("offload-space", "rank 2: writing a", tmp_path, "ENOSPC"):
            rest.flush()


def test_a_limit_on_files_that_falls(tmp_path: Path) -> None:
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
        rest.add("a", 8 * PAGE_BYTES, torch.uint8)
        with largest_file(PAGE_BYTES):
            rest.put(["a"], rest.fetch(["a"], read=False).wait())
            with refused("offload-space", "writing a", "EFBIG"):
                rest.flush()


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    with closing(FileOffloadStore(tmp_path, 3, 2)) as rest:
        rest.add("a", 4 * PAGE_BYTES, torch.uint8)
        os.ftruncate(descriptor_in(tmp_path), 2 * PAGE_BYTES)
        with refused("offload-file-works", "rank 3: mapping a", tmp_path, "EIO"):
            rest.view("a")
        with refused("offload-file-works", "rank 3: reading a", tmp_path, f"byte {2 * PAGE_BYTES}"):
            rest.fetch(["a"]).wait()


def test_a_file_that_is_cut_short_is_not_filled_up_with_zeros(tmp_path: Path) -> None:
    with closing(FileOffloadStore(tmp_path, 3, 2)) as rest:
        for key in "ab":
            rest.add(key, PAGE_BYTES, torch.uint8)
        (b,) = rest.fetch(["b"]).wait()
        os.ftruncate(descriptor_in(tmp_path), 0)
        # A write of b alone would make the file long enough for a to be read, as zeros.
        rest.put(["b"], [b])
        with refused("offload-file-works", "rank 3: writing b", tmp_path, "byte 0"):
            rest.flush()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_what_fails_in_a_thread_is_raised_by_every_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with closing(FileOffloadStore(tmp_path, 3, 2)) as rest:
        rest.add("a", 4 * PAGE_BYTES, torch.uint8)
        rest.add("b", 4 * PAGE_BYTES, torch.uint8)
        (a,) = rest.fetch(["a"]).wait()

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, call, broken)
        doing = "reading b" if call == "preadv" else "writing a"
        words = ("offload-file-works", f"rank 3: {doing}", tmp_path, "Input/output error (EIO)")
        if call == "preadv":
            ahead = rest.fetch(["b"])
            with refused(*words):
                ahead.wait()
            with refused(*words):
                rest.put(["a"], [a])
        else:
            rest.put(["a"], [a])
        with refused(*words):
            rest.flush()
        with refused(*words):
            rest.fetch(["b"])
        with refused(*words):
            rest.view("a")


def test_who_waits_for_a_set_behind_one_that_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(FileOffloadStore(tmp_path, 0, 1)) as rest:
        for key in "ab":
            rest.add(key, PAGE_BYTES, torch.uint8)
        (a,) = rest.fetch(["a"]).wait()
        ahead = rest.fetch(["b"])

        def broken(*_: object) -> int:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

        monkeypatch.setattr(os, "pwritev", broken)
        rest.put(["a"], [a])
        with refused("offload-file-works", "ENODEV"):
            ahead.wait()
