# SPDX-License-Identifier: Apache-2.0
"""What this host has for ranks: cores and memory, less in a control group, and freed memory kept.

A training step frees and asks for the same large tensors again and again. By default the C library
gives each tensor of more than 128 KiB back to the kernel and gets zeroed pages for the next one:
page faults that cost 5 % of a step on CPU. With higher thresholds the pages stay with the process;
its peak does not change.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook.launch import ENOUGH_MEMORY, GLOO_INTERFACE
from echelon.core.units import binary_bytes

START_BYTES = 2**28
"""What starting ranks takes: torch, once."""
RANK_BYTES = 2**25
"""What each forked rank adds while it proves a shrunk model."""
THREAD_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Where Linux counts what the calling thread has run, and has queued for a core, in ns."""
CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows control groups."""
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
"""Where Linux says which control groups this process is in."""
_M_TRIM_THRESHOLD = -1  # option of mallopt(3)
_M_MMAP_THRESHOLD = -3  # option of mallopt(3)
_LARGEST_THRESHOLD = 32 * 2**20  # bytes
_NEVER = 2**31 - 1  # bytes


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """File names of a control group's memory limit and use, and the name of its cache count."""

    limit: str
    used: str
    cached: str


_UNIFIED = _MemoryFiles("memory.max", "memory.current", "inactive_file")
"""Version 2."""
_MEMORY_CONTROLLER = _MemoryFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
"""Version 1."""


def num_usable_cores() -> float:
    """Return the cores that this process may use: by affinity, and by the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = first_words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0] != "max":
        usable = min(usable, int(quota[0]) / int(quota[1]))
    return usable


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Bytes that new processes may take below one limit: the machine, or a control group."""

    name: str
    """``this machine``, or the folder of the control group."""
    total_bytes: int
    free_bytes: int

    def says(self) -> str:
        """Return the arithmetic of the free bytes."""
        used = self.total_bytes - self.free_bytes
        return (
            f"{self.name}: {binary_bytes(self.total_bytes)} - {binary_bytes(used)} in use = "
            f"{binary_bytes(self.free_bytes)} free"
        )


def tightest_memory_limit(
    root: Path = CGROUPS, membership: Path = CGROUP_MEMBERSHIP
) -> MemoryLimit:
    """Tightest limit of free memory: the machine, or a control group of this process."""
    machine = psutil.virtual_memory()
    limits = [
        MemoryLimit(
            name="this machine", total_bytes=machine.total, free_bytes=int(machine.available)
        ),
        *_cgroup_limits(root, membership, machine.total),
    ]
    return min(limits, key=lambda limit: limit.free_bytes)


def _cgroup_limits(root: Path, membership: Path, machine_bytes: int) -> Iterator[MemoryLimit]:
    """Yield the memory limits of the control groups of this process and of those around them.

    A container may see the group names of its host, and its own group at the root only. The kernel
    reclaims inactive pages of files when memory is short, so these pages do not count as in use.
    """
    for line in _lines(membership):
        number, controllers, name = (*line.split(":", 2), "", "")[:3]
        if number == "0" and controllers == "":
            names, base = _UNIFIED, root
        elif "memory" in controllers.split(","):
            names, base = _MEMORY_CONTROLLER, root / "memory"
        else:
            continue
        folder = base / name.strip("/")
        parents = [parent for parent in folder.parents if parent.is_relative_to(base)]
        for group in (folder, *parents):
            limit, used = first_words(group / names.limit), first_words(group / names.used)
            if not (limit and used and limit[0].isdigit() and int(limit[0]) < machine_bytes):
                continue
            cached = _value_of(group / "memory.stat", names.cached)
            in_use = max(0, int(used[0]) - cached)
            total = int(limit[0])
            yield MemoryLimit(name=str(group), total_bytes=total, free_bytes=max(0, total - in_use))


def _value_of(path: Path, name: str) -> int:
    """Return a number of a file of names and numbers; 0 where it has none of this name."""
    words = first_words(path)
    return next((int(n) for key, n in zip(words[::2], words[1::2], strict=False) if key == name), 0)


def total_memory_bytes() -> int:
    """Return the memory of this machine, or of the control group that this process is in."""
    machine = psutil.virtual_memory().total
    limits = _cgroup_limits(CGROUPS, CGROUP_MEMBERSHIP, machine)
    return min([machine, *(limit.total_bytes for limit in limits)])


def interface_problem(names: str | None) -> Problem | None:
    """Return the problem of an interface of Gloo that this host lacks; None without a problem."""
    interfaces = psutil.net_if_addrs()
    if not names or {*names.split(",")} <= {*interfaces}:
        return None
    return GLOO_INTERFACE.problem(
        f"GLOO_SOCKET_IFNAME is {names}, and there is no such interface",
        key="GLOO_SOCKET_IFNAME",
        set_by=f"GLOO_SOCKET_IFNAME={names}",
        suggestions=[f"GLOO_SOCKET_IFNAME={name}" for name in interfaces],
    )


def available_memory_bytes() -> int:
    """Return the bytes that new processes could take: of the machine, and of control groups."""
    return tightest_memory_limit(CGROUPS, CGROUP_MEMBERSHIP).free_bytes


def require_memory_for_ranks(num_ranks: int) -> None:
    """Raise EnvironmentProblem where this machine has no room for so many small ranks."""
    needed = START_BYTES + num_ranks * RANK_BYTES
    available = available_memory_bytes()
    if needed > available:
        fits = max(0, available - START_BYTES) // RANK_BYTES
        raise EnvironmentProblem(
            ENOUGH_MEMORY.problem(
                f"{num_ranks} ranks on this machine take about {binary_bytes(START_BYTES)} + "
                f"{num_ranks} x {binary_bytes(RANK_BYTES)} = {binary_bytes(needed)}, and "
                f"{binary_bytes(available)} of memory is free",
                key="mesh",
                suggestions=[f"a mesh of up to {fits} ranks"] if fits else [],
            )
        )


def first_words(path: Path) -> list[str]:
    """Return the words in a small file of the system; none where there is no such file."""
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def keep_freed_memory() -> bool:
    """Raise the thresholds of glibc's allocator; return False where there is no such allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> bool:
    """Give pages of freed memory to the kernel now; return False where there was nothing to give.

    For when something large was freed that is not asked for again: parameters that have moved.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


@dataclass(frozen=True, slots=True)
class ThreadClock:
    """Say how long the calling thread has been on a core, and how long it has queued for one."""

    cpu_s: float
    queued_s: float

    @classmethod
    def read(cls, schedstat: Path = THREAD_SCHEDSTAT) -> ThreadClock:
        """Return both as the kernel counts them.

        Without Linux's /proc a queue is not known, and counts as 0.
        """
        try:
            queued = int(schedstat.read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            queued = 0.0
        return cls(time.thread_time(), queued)

    def blocked_since(self, earlier: ThreadClock, wall_s: float) -> float:
        """Return how much of `wall_s` the thread neither ran nor queued for a core: it waited."""
        away = wall_s - (self.cpu_s - earlier.cpu_s) - (self.queued_s - earlier.queued_s)
        return max(0.0, away)
