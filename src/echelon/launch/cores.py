"""How many cores this process may use, which a container may make fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path


def num_usable_cores() -> float:
    """Return the cores that this process may use: by affinity, and by the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = first_words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0] != "max":
        usable = min(usable, int(quota[0]) / int(quota[1]))
    return usable


def first_words(path: Path) -> list[str]:
    """Return the words in a small file of the system; none where there is no such file."""
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
