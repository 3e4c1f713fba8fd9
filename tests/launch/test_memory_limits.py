"""Free memory of the machine and of control groups (versions 1 and 2): the tightest counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from echelon.launch import host
from echelon.launch.host import tightest_memory_limit

MIB = 2**20
UNLIMITED = str(2**63 - 4096)


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
