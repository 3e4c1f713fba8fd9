"""Slices in files: what the disk refuses is told, nothing hangs, and nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch

from echelon.core import offload_file
from echelon.core.errors import EnvironmentProblem
from echelon.core.offload_file import PAGE, offload_folder_problems
from echelon.parallel.offload.files import FileRest
from echelon.parallel.offload.host import HostRest

MIB = 2**20
PUNCH_HOLE_KEEP_SIZE = 0x03


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


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with refused("offload-folder-exists", "rank 3", missing, "does not exist"):
        FileRest(missing, 3, 2)
    assert not missing.exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with refused("offload-folder-exists", file, "is not a folder"):
        FileRest(file, 0, 2)
    with refused("offload-folder-exists", "does not exist"):
        FileRest(file / "below", 0, 2)


def test_a_folder_of_the_system_that_takes_no_files() -> None:
    with refused("offload-folder-writable", "rank 1", "/proc"):
        FileRest(Path("/proc"), 1, 2)


def test_a_folder_that_is_mounted_read_only(tmp_path: Path) -> None:
    with mounted("ro", tmp_path), refused("offload-folder-writable", tmp_path, "EROFS"):
        FileRest(tmp_path, 0, 2)


def test_a_folder_is_judged_before_any_rank_starts(tmp_path: Path) -> None:
    assert offload_folder_problems(tmp_path, 100 * PAGE) == []
    assert list(tmp_path.iterdir()) == []
    (problem,) = offload_folder_problems(tmp_path / "missing")
    assert (problem.rule, problem.key) == ("offload-folder-exists", "zero.offload_dir")
    (problem,) = offload_folder_problems(tmp_path, 2**60)
    assert problem.rule == "offload-space"
    assert "1024.00 PiB" in problem.message


def test_a_disk_that_is_full_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    with mounted(f"size={16 * PAGE}", tmp_path), closing(FileRest(tmp_path, 2, 2)) as rest:
        rest.add("a", 8 * PAGE, torch.uint8)
        with refused("offload-space", "rank 2", tmp_path, "ENOSPC"):
            rest.add("b", 16 * PAGE, torch.uint8)


def test_a_limit_on_files_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    with (
        largest_file(4 * PAGE),
        closing(FileRest(tmp_path, 2, 2)) as rest,
        refused("offload-space", "rank 2", tmp_path, "EFBIG"),
    ):
        rest.add("b", 5 * PAGE, torch.uint8)


def test_a_disk_that_cannot_reserve_is_filled_with_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with mounted(f"size={700 * PAGE}", tmp_path), closing(FileRest(tmp_path, 2, 2)) as rest:
        rest.add("a", 300 * PAGE + 1, torch.uint8)
        assert not rest.view("a").any()
        with refused("offload-space", "ENOSPC"):
            rest.add("b", 400 * PAGE, torch.uint8)


def test_a_disk_that_is_full_when_written_to(tmp_path: Path) -> None:
    with mounted(f"size={16 * PAGE}", tmp_path), closing(FileRest(tmp_path, 2, 2)) as rest:
        rest.add("a", 8 * PAGE, torch.uint8)
        # What was reserved is taken away, as by a file system that promised more than it has.
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
        size = ctypes.c_int64(8 * PAGE)
        descriptor = descriptor_in(tmp_path)
        assert fallocate(descriptor, PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), size) == 0
        space = os.statvfs(tmp_path)
        (tmp_path / "other").write_bytes(bytes(space.f_bavail * space.f_frsize))
        rest.put(["a"], rest.fetch(["a"], read=False).wait())
        with refused("offload-space", "rank 2: writing a", tmp_path, "ENOSPC"):
            rest.flush()


def test_a_limit_on_files_that_falls(tmp_path: Path) -> None:
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        rest.add("a", 8 * PAGE, torch.uint8)
        with largest_file(PAGE):
            rest.put(["a"], rest.fetch(["a"], read=False).wait())
            with refused("offload-space", "writing a", "EFBIG"):
                rest.flush()


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    with closing(FileRest(tmp_path, 3, 2)) as rest:
        rest.add("a", 4 * PAGE, torch.uint8)
        os.ftruncate(descriptor_in(tmp_path), 2 * PAGE)
        with refused("offload-file-works", "rank 3: mapping a", tmp_path, "EIO"):
            rest.view("a")
        with refused("offload-file-works", "rank 3: reading a", tmp_path, f"byte {2 * PAGE}"):
            rest.fetch(["a"]).wait()


def test_a_file_that_is_cut_short_is_not_filled_up_with_zeros(tmp_path: Path) -> None:
    with closing(FileRest(tmp_path, 3, 2)) as rest:
        for key in "ab":
            rest.add(key, PAGE, torch.uint8)
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
    with closing(FileRest(tmp_path, 3, 2)) as rest:
        rest.add("a", 4 * PAGE, torch.uint8)
        rest.add("b", 4 * PAGE, torch.uint8)
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
    with closing(FileRest(tmp_path, 0, 1)) as rest:
        for key in "ab":
            rest.add(key, PAGE, torch.uint8)
        (a,) = rest.fetch(["a"]).wait()
        ahead = rest.fetch(["b"])

        def broken(*_: object) -> int:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

        monkeypatch.setattr(os, "pwritev", broken)
        rest.put(["a"], [a])
        with refused("offload-file-works", "ENODEV"):
            ahead.wait()


def test_a_bug_in_a_thread_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        rest.add("a", PAGE, torch.uint8)

        def broken(*_: object) -> int:
            raise ZeroDivisionError

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ZeroDivisionError):
            rest.fetch(["a"]).wait()


def test_reading_and_writing_go_on_behind_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, preadv, pwritev = Event(), os.preadv, os.pwritev
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        for key in "abc":
            rest.add(key, PAGE, torch.uint8)
            rest.view(key).fill_(ord(key))
        monkeypatch.setattr(os, "preadv", lambda *given: go_on.wait() and preadv(*given))
        one, two, three = rest.fetch(["a"]), rest.fetch(["b"]), rest.fetch(["c"])
        assert not one.arrived()
        go_on.set()
        (a,) = one.wait()
        assert int(a[0]) == ord("a")
        (b,) = two.wait()
        assert int(b[0]) == ord("b")
        assert not three.arrived()
        go_on.clear()
        monkeypatch.setattr(os, "pwritev", lambda *given: go_on.wait() and pwritev(*given))
        rest.put(["a"], [a.fill_(1)])
        assert not three.arrived()
        go_on.set()
        assert int(three.wait()[0][0]) == ord("c")
        assert int(rest.view("a")[0]) == 1


def test_a_caller_who_keeps_all_buffers_is_told(tmp_path: Path) -> None:
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        for key in "abc":
            rest.add(key, PAGE, torch.uint8)
        held = [rest.fetch([key]) for key in "abc"]
        held[0].wait()
        with pytest.raises(AssertionError, match="the caller has all of them"):
            held[2].wait()
        held[1].release()
        held[2].wait()


def test_closing_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, preadv = Event(), os.preadv
    rest = FileRest(tmp_path, 0, 1)
    for key in "ab":
        rest.add(key, 64 * MIB, torch.uint8)
    monkeypatch.setattr(os, "preadv", lambda *given: go_on.wait(0.05) or preadv(*given))
    rest.fetch(["a"])
    ahead = rest.fetch(["b"])
    rest.close()
    with pytest.raises(AssertionError, match="closed"):
        ahead.wait()
    with pytest.raises(AssertionError, match="closed"):
        rest.fetch(["a"])


@pytest.mark.parametrize("named", [False, True], ids=["nameless", "unlinked"])
def test_no_file_is_seen_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        rest.add("a", 10, torch.float32)
        rest.put(["a"], [torch.ones(10)])
        rest.flush()
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(rest.view("a"), torch.ones(10))


def test_a_file_system_without_direct_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with closing(FileRest(tmp_path, 0, 2)) as rest:
        rest.add("a", 10, torch.float32)
        rest.put(["a"], [torch.ones(10)])
        rest.flush()
        assert not offload_file.is_direct(descriptor_in(tmp_path))
        assert torch.equal(rest.view("a"), torch.ones(10))

        def broken(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", broken)
        with refused("offload-file-works", "EIO"):
            rest.flush()


KILLED = """
import sys, torch, pathlib
from echelon.parallel.offload.files import FileRest
rest = FileRest(pathlib.Path(sys.argv[1]), 0, 2)
rest.add("a", 4 * 2**20, torch.uint8)
rest.put(["a"], [torch.ones(4 * 2**20, dtype=torch.uint8)])
rest.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_file_and_no_space_taken(tmp_path: Path) -> None:
    with mounted("size=8m", tmp_path):
        free = os.statvfs(tmp_path).f_bavail
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert os.statvfs(tmp_path).f_bavail < free
            assert list(tmp_path.iterdir()) == []
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert os.statvfs(tmp_path).f_bavail == free


BOUNDED = """
import resource, sys, torch, pathlib
from echelon.parallel.offload.files import FileRest
rest = FileRest(pathlib.Path(sys.argv[1]), 0, 2)
SIZE, KEYS = 8 * 2**20, [str(number) for number in range(24)]
for key in KEYS:
    rest.add(key, SIZE, torch.uint8)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
for _ in range(2):
    ahead = rest.fetch(KEYS[:1])
    for number in range(len(KEYS)):
        (values,) = ahead.wait()
        ahead = rest.fetch([KEYS[(number + 1) % len(KEYS)]])
        values += 1
        rest.put([KEYS[number]], [values])
    ahead.release()
rest.flush()
print(peak() - before, rest.live_bytes()["host"])
assert int(rest.view("23")[-1]) == 2
"""


def test_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path)], capture_output=True, check=True, text=True
    )
    grown, buffers = map(int, done.stdout.split())
    assert buffers == 2 * 8 * MIB
    assert grown < buffers + 8 * MIB


def test_memory_of_the_host_that_is_refused() -> None:
    with closing(HostRest()) as rest, refused("offload-host-memory", "1024.00 PiB"):
        rest.add("a", 2**60, torch.uint8)
