"""Slices in files: moved behind the caller, in bounded memory, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
import torch

from echelon.core import disk as offload_file
from echelon.core.disk import PAGE_BYTES
from echelon.parallel.offload.file_store import FileExtent, FileFetch, FileOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from tests.parallel.offload.disks import descriptor_in, mounted, refused

MIB = 2**20

SMALL = FileExtent(key="small", start=0, numel=3, dtype=torch.float64)
LARGE = FileExtent(key="large", start=PAGE_BYTES, numel=PAGE_BYTES, dtype=torch.int16)


def test_a_bug_in_a_thread_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
        rest.add("a", PAGE_BYTES, torch.uint8)

        def broken(*_: object) -> int:
            raise ZeroDivisionError

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ZeroDivisionError):
            rest.fetch(["a"]).wait()


def test_reading_and_writing_go_on_behind_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, preadv, pwritev = Event(), os.preadv, os.pwritev
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
        for key in "abc":
            rest.add(key, PAGE_BYTES, torch.uint8)
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
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
        for key in "abc":
            rest.add(key, PAGE_BYTES, torch.uint8)
        held = [rest.fetch([key]) for key in "abc"]
        held[0].wait()
        with pytest.raises(AssertionError, match="the caller has all of them"):
            held[2].wait()
        held[1].release()
        held[2].wait()


def test_closing_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, preadv = Event(), os.preadv
    rest = FileOffloadStore(tmp_path, 0, 1)
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
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
        rest.add("a", 10, torch.float32)
        rest.put(["a"], [torch.ones(10)])
        rest.flush()
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(rest.view("a"), torch.ones(10))


def test_a_file_system_without_direct_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with closing(FileOffloadStore(tmp_path, 0, 2)) as rest:
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
from echelon.parallel.offload.file_store import FileOffloadStore
rest = FileOffloadStore(pathlib.Path(sys.argv[1]), 0, 2)
rest.add("a", 4 * 2**20, torch.uint8)
rest.put(["a"], [torch.ones(4 * 2**20, dtype=torch.uint8)])
rest.flush()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.system("S26")
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
from echelon.parallel.offload.file_store import FileOffloadStore
rest = FileOffloadStore(pathlib.Path(sys.argv[1]), 0, 2)
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


@pytest.mark.slow
@pytest.mark.system("S26")
def test_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path)], capture_output=True, check=True, text=True
    )
    grown, buffers = map(int, done.stdout.split())
    assert buffers == 2 * 8 * MIB
    assert grown < buffers + 8 * MIB


def test_memory_of_the_host_that_is_refused() -> None:
    with (
        closing(MemoryOffloadStore()) as rest,
        refused("offload-host-memory", "1024.00 PiB"),
    ):
        rest.add("a", 2**60, torch.uint8)


def fetched() -> FileFetch:
    """Return a set that has its buffer and has been read."""
    found = FileFetch([SMALL, LARGE], read=True, wait_for=FileFetch.tensors, release=lambda _: None)
    found.buffer = torch.zeros(found.size, dtype=torch.uint8)
    found.phase = "ready"
    return found


def test_a_key_takes_whole_pages() -> None:
    assert (SMALL.num_bytes, SMALL.span_bytes) == (24, PAGE_BYTES)
    assert (LARGE.num_bytes, LARGE.span_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert fetched().size == 3 * PAGE_BYTES


def test_tensors_are_views_of_the_buffer_in_the_order_of_the_keys() -> None:
    found = fetched()
    small, large = found.wait()
    assert (small.dtype, small.shape) == (torch.float64, (3,))
    assert (large.dtype, large.shape) == (torch.int16, (PAGE_BYTES,))
    large.fill_(-1)
    assert found.buffer is not None
    assert int(found.buffer.count_nonzero()) == 2 * PAGE_BYTES
    assert not small.any()


def test_a_set_has_arrived_from_ready_on() -> None:
    found = FileFetch([SMALL], read=True, wait_for=FileFetch.tensors, release=lambda _: None)
    assert not found.arrived()
    found.phase = "reading"
    assert not found.arrived()
    assert fetched().arrived()
    assert repr(fetched()) == "the set of small, large"


def test_only_its_own_tensors_are_put() -> None:
    found = fetched()
    small, large = found.tensors()
    parts = found.parts_of(["large"], [large])
    assert [(place.key, part.nbytes) for place, part in parts] == [("large", 2 * PAGE_BYTES)]
    with pytest.raises(AssertionError, match=r"another key's place"):
        found.parts_of(["large", "small"], [small, large])
    with pytest.raises(AssertionError, match=r"is put as torch\.int64"):
        found.parts_of(["small"], [small.view(torch.int64)])
    with pytest.raises(AssertionError, match=r"is put as \[2\]"):
        found.parts_of(["small"], [small[:2]])
    found.phase = "done"
    with pytest.raises(AssertionError, match="not the caller's any more"):
        found.parts_of(["small"], [small])
