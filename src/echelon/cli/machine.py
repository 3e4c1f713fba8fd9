"""What this machine has, and which of the things that a run needs it lacks.

Each finding reads one thing. It says what is there as text and as JSON, and carries a problem where
that is not enough: a needed one keeps runs from working at all, the others from working in full.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.rulebook import machine as rules
from echelon.core.units import binary_bytes
from echelon.launch.cores import first_words, num_usable_cores

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_MEMORY_BYTES = 2 * 2**30
MIN_SHARED_MEMORY_BYTES = 2**30
MIN_DISK_BYTES = 2**30

START_BYTES = 2**28
"""What starting ranks takes: torch, once."""
RANK_BYTES = 2**25
"""What each forked rank adds while it proves a shrunk model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Say what one look at the machine found."""

    name: str
    text: str
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    problem: Problem | None = None
    needed: bool = True

    @property
    def stops_runs(self) -> bool:
        """Return whether no run can work like this."""
        return self.problem is not None and self.needed


def examine(folder: Path) -> Iterator[Finding]:
    """Yield every finding about this machine; runs would be written below `folder`."""
    yield python()
    gpus = find_gpus()
    yield gpus
    has_gpus = gpus.facts["devices"] != []
    yield from torch_and_backends(needs_nccl=has_gpus)
    yield cores()
    yield memory()
    yield shared_memory(needed_by_nccl=has_gpus)
    yield ports()
    yield gloo_interface()
    yield disk(folder)


def python() -> Finding:
    """Find the interpreter."""
    version = platform.python_version()
    problem = None
    if sys.version_info[:2] < MIN_PYTHON:
        problem = rules.PYTHON_VERSION.problem(
            f"this is Python {version}; Echelon needs 3.11 or later", works=("3.11", "3.12", "3.13")
        )
    return Finding(
        name="python",
        text=f"{version} on {platform.system()} {platform.machine()}",
        facts={
            "version": version,
            "system": platform.system(),
            "release": platform.release(),
            "architecture": platform.machine(),
            "executable": sys.executable,
        },
        problem=problem,
    )


def find_gpus() -> Finding:
    """Find NVIDIA GPUs by the driver, which needs no torch."""
    import pynvml

    devices: list[dict[str, object]] = []
    driver = None
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            devices.append({"name": str(pynvml.nvmlDeviceGetName(handle)), "memory_bytes": total})
    except pynvml.NVMLError:
        pass  # No driver, or no permission to ask it: ranks then run on the CPU.
    names = {f"{gpu['name']}" for gpu in devices}
    text = f"{len(devices)} x {', '.join(sorted(names))}" if devices else "none; ranks use the CPU"
    return Finding(name="gpus", text=text, facts={"driver": driver, "devices": devices})


def torch_and_backends(*, needs_nccl: bool) -> Iterator[Finding]:
    """Find torch and the backends that ranks can talk over."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield Finding(
            name="torch",
            text="not installed",
            facts={"version": None},
            problem=rules.TORCH_INSTALLED.problem(
                f"torch cannot be imported ({error}); proving and training need it",
                works=("pip install 'echelon[train]'",),
            ),
        )
        return
    version = torch.__version__
    problem = None
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_TORCH:
        problem = rules.TORCH_VERSION.problem(f"torch {version} is older than 2.11")
    extras = {name: _version(name) for name in ("numpy", "safetensors", "tokenizers", "pyarrow")}
    yield Finding(
        name="torch",
        text=f"{version}, {torch.get_num_threads()} threads",
        facts={"version": version, "cuda": torch.version.cuda, "packages": extras},
        problem=problem,
    )
    found = dist.is_available()
    backends = {
        "gloo": found and dist.is_gloo_available(),
        "nccl": found and dist.is_nccl_available(),
    }
    wanted = "nccl" if needs_nccl else "gloo"
    yield Finding(
        name="backends",
        text=", ".join(name for name, there in backends.items() if there) or "none",
        facts=backends,
        problem=None
        if backends[wanted]
        else rules.BACKEND_AVAILABLE.problem(f"this torch {version} is built without {wanted}"),
        needed=not backends["gloo"],
    )


def cores() -> Finding:
    """Find how many cores this process may use, which a container may make fewer."""
    usable = num_usable_cores()
    total = os.cpu_count() or usable
    return Finding(
        name="cores",
        text=f"{usable:g} usable of {total}",
        facts={"usable": usable, "total": total},
    )


def memory() -> Finding:
    """Find how much memory ranks could take now."""
    available = available_memory_bytes()
    total = psutil.virtual_memory().total
    problem = None
    if available < MIN_MEMORY_BYTES:
        problem = rules.ENOUGH_MEMORY.problem(
            f"{binary_bytes(available)} of memory is free; a run of a few ranks needs "
            f"{binary_bytes(MIN_MEMORY_BYTES)}"
        )
    return Finding(
        name="memory",
        text=f"{binary_bytes(available)} free of {binary_bytes(total)}",
        facts={"available_bytes": available, "total_bytes": total},
        problem=problem,
        needed=False,
    )


def require_memory_for_ranks(num_ranks: int) -> None:
    """Raise EnvironmentProblem where this machine has no room for so many small ranks."""
    needed = START_BYTES + num_ranks * RANK_BYTES
    available = available_memory_bytes()
    if needed > available:
        fits = max(0, available - START_BYTES) // RANK_BYTES
        raise EnvironmentProblem(
            rules.ENOUGH_MEMORY.problem(
                f"{num_ranks} ranks on this machine take about {binary_bytes(START_BYTES)} + "
                f"{num_ranks} x {binary_bytes(RANK_BYTES)} = {binary_bytes(needed)}, and "
                f"{binary_bytes(available)} of memory is free",
                key="mesh",
                works=[f"a mesh of up to {fits} ranks"] if fits else [],
            )
        )


def available_memory_bytes() -> int:
    """Return the bytes that new processes could take: of the machine, and of the container."""
    available = psutil.virtual_memory().available
    limit = first_words(Path("/sys/fs/cgroup/memory.max"))
    used = first_words(Path("/sys/fs/cgroup/memory.current"))
    if limit and used and limit[0] != "max":
        available = min(available, int(limit[0]) - int(used[0]))
    return available


def shared_memory(*, needed_by_nccl: bool, path: Path = Path("/dev/shm")) -> Finding:
    """Find the room in /dev/shm, which NCCL uses between the GPUs of one machine."""
    if not path.is_dir():
        return Finding(name="shared memory", text=f"no {path} here", facts={"free_bytes": None})
    free = shutil.disk_usage(path).free
    problem = None
    if needed_by_nccl and free < MIN_SHARED_MEMORY_BYTES:
        problem = rules.SHARED_MEMORY.problem(
            f"{path} has {binary_bytes(free)}; NCCL on this machine wants "
            f"{binary_bytes(MIN_SHARED_MEMORY_BYTES)}"
        )
    return Finding(
        name="shared memory",
        text=f"{binary_bytes(free)} free",
        facts={"free_bytes": free},
        problem=problem,
        needed=False,
    )


def ports() -> Finding:
    """Find whether ranks may listen and connect on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return Finding(
            name="ports",
            text="none",
            facts={"loopback": False},
            problem=rules.PORT_AVAILABLE.problem(f"cannot listen on 127.0.0.1: {error}"),
        )
    return Finding(name="ports", text="loopback works", facts={"loopback": True})


def gloo_interface(resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    """Find the interface that Gloo would listen at."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    facts: dict[str, object] = {"interfaces": interfaces, "GLOO_SOCKET_IFNAME": chosen}
    if chosen is not None:
        problem = None
        if not set(chosen.split(",")) <= set(interfaces):
            problem = rules.GLOO_INTERFACE.problem(
                f"GLOO_SOCKET_IFNAME is {chosen}, and there is no such interface",
                key="GLOO_SOCKET_IFNAME",
                set_by="the environment",
                works=interfaces,
            )
        return Finding(name="gloo interface", text=chosen, facts=facts, problem=problem)
    host = socket.gethostname()
    try:
        address = resolve(host)
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        problem = rules.GLOO_INTERFACE.problem(
            f"the name of this host, {host}, does not lead to an address of it: {error}",
            key="GLOO_SOCKET_IFNAME",
            works=interfaces,
        )
        return Finding(
            name="gloo interface", text="none", facts=facts, problem=problem, needed=False
        )
    name = next((n for n, addresses in interfaces.items() if address in addresses), "loopback")
    return Finding(
        name="gloo interface",
        text=f"{name} ({address})",
        facts={**facts, "address": address, "interface": name},
    )


def disk(folder: Path) -> Finding:
    """Find the room for checkpoints in `folder`, and whether it may be written to."""
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    problem = None
    if not writable or free < MIN_DISK_BYTES:
        what = f"has {binary_bytes(free)} free" if writable else "is not writable"
        problem = rules.DISK_SPACE.problem(f"the folder {folder} {what}", key="train.runs_dir")
    return Finding(
        name="disk",
        text=f"{binary_bytes(free)} free, {'writable' if writable else 'read-only'}",
        facts={"folder": str(folder), "free_bytes": free, "writable": writable},
        problem=problem,
        needed=False,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
