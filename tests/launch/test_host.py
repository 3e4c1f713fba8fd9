"""A rank keeps the pages of tensors that it frees; free memory is that of the tightest limit."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from echelon.launch import host
from echelon.launch.context import RankContext
from echelon.launch.host import ThreadClock, give_back_freed_memory, tightest_memory_limit
from echelon.launch.local.supervisor import RankPool

MIB = 2**20
UNLIMITED = str(2**63 - 4096)
MEGABYTES = 8
ROUNDS = 20


def page_faults(_context: RankContext, _argument: object) -> int:
    """Return the page faults of making and freeing a large tensor, once the heap has grown."""
    for _ in range(ROUNDS):
        torch.ones(MEGABYTES * 2**18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        torch.ones(MEGABYTES * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_rank_does_not_fault_its_tensors_in_again(rank_pool: RankPool) -> None:
    (faults,) = rank_pool.run(page_faults)
    pages_of_one = MEGABYTES * 2**20 // resource.getpagesize()
    assert faults < pages_of_one


def resident_bytes(_context: RankContext, _argument: object) -> tuple[int, int]:
    """Return what is resident after a large tensor was freed, and once it was given back."""
    tensors = [torch.ones(MEGABYTES * 2**18) for _ in range(ROUNDS)]
    last = torch.ones(MEGABYTES * 2**18)  # above them: the heap does not end where they were
    del tensors
    before = psutil.Process().memory_info().rss
    give_back_freed_memory()
    after = psutil.Process().memory_info().rss
    return before, after + 0 * last.numel()


def test_a_rank_gives_back_what_it_freed_when_asked(rank_pool: RankPool) -> None:
    ((before, after),) = rank_pool.run(resident_bytes)
    assert before - after > 0.8 * ROUNDS * MEGABYTES * 2**20


def test_what_is_neither_run_nor_queued_for_is_blocked(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("7000000000 2500000000 9\n", encoding="ascii")
    assert ThreadClock.read(schedstat).queued_s == 2.5
    assert ThreadClock.read(tmp_path / "nothing").queued_s == 0.0
    before, after = ThreadClock(1.0, 0.5), ThreadClock(2.0, 0.75)
    assert after.blocked_since(before, 2.0) == 0.75
    assert after.blocked_since(before, 1.0) == 0.0
    here, start = ThreadClock.read(), time.perf_counter()
    time.sleep(0.05)
    wall_s = time.perf_counter() - start
    assert 0 < ThreadClock.read().blocked_since(here, wall_s) <= wall_s


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")


def membership(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def test_version_2_counts_what_is_in_use_without_cached_files(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(
        root,
        {
            "job/memory.max": str(100 * MIB),
            "job/memory.current": str(60 * MIB),
            "job/memory.stat": f"anon {40 * MIB}\ninactive_file {15 * MIB}\nslab 1",
        },
    )
    limit = tightest_memory_limit(root, membership(tmp_path, "0::/job"))
    assert (limit.total_bytes, limit.free_bytes) == (100 * MIB, 55 * MIB)
    assert limit.says() == f"{root}/job: 100.00 MiB - 45.00 MiB in use = 55.00 MiB free"


def test_a_group_around_this_one_may_be_the_tightest(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(
        root,
        {
            "batch/memory.max": str(80 * MIB),
            "batch/memory.current": str(79 * MIB),
            "batch/step/memory.max": str(70 * MIB),
            "batch/step/memory.current": str(10 * MIB),
        },
    )
    limit = tightest_memory_limit(root, membership(tmp_path, "0::/batch/step"))
    assert (limit.name, limit.free_bytes) == (str(root / "batch"), MIB)


def test_version_1_has_a_folder_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(
        root,
        {
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": str(10**9),
            "memory/docker/1/memory.limit_in_bytes": str(64 * MIB),
            "memory/docker/1/memory.usage_in_bytes": str(32 * MIB),
            "memory/docker/1/memory.stat": f"cache 5\ntotal_inactive_file {2 * MIB}",
        },
    )
    own = membership(tmp_path, "9:name=systemd:/", "4:cpu,memory:/docker/1", "0::/")
    assert tightest_memory_limit(root, own).free_bytes == 34 * MIB


def test_a_container_finds_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files = {"memory.limit_in_bytes": str(48 * MIB), "memory.usage_in_bytes": str(16 * MIB)}
    write(root / "memory", files)
    own = membership(tmp_path, "4:memory:/docker/a-name-of-the-host")
    assert tightest_memory_limit(root, own).free_bytes == 32 * MIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED, "nonsense"])
def test_without_a_limit_the_machine_is_what_counts(tmp_path: Path, limit: str) -> None:
    root = tmp_path / "cgroup"
    write(root, {"memory.max": limit, "memory.current": "5"})
    tightest = tightest_memory_limit(root, membership(tmp_path, "0::/"))
    assert (tightest.name, tightest.total_bytes) == ("this machine", psutil.virtual_memory().total)
    assert tightest_memory_limit(tmp_path / "absent", tmp_path / "absent").name == "this machine"


def test_a_group_that_uses_more_than_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, {"memory.max": "1000", "memory.current": "1200"})
    assert tightest_memory_limit(root, membership(tmp_path, "0::/")).free_bytes == 0


def test_total_memory_is_that_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "cgroup", {"memory.max": "4096", "memory.current": "1024"})
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "CGROUP_MEMBERSHIP", membership(tmp_path, "0::/"))
    assert host.total_memory_bytes() == 4096
    assert host.available_memory_bytes() == 3072
