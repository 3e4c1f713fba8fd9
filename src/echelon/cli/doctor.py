# SPDX-License-Identifier: Apache-2.0
"""`echelon doctor`: what this machine has, and which of the things that a run needs it lacks.

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
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from echelon.cli.flags import Json
from echelon.cli.output import WIDEST, page_columns, print_error, print_json
from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.optional import install_command
from echelon.core.rulebook import launch as rules
from echelon.core.units import binary_bytes
from echelon.core.version import __version__
from echelon.launch.environment import (
    LAUNCH_VARIABLES,
    is_launched,
    local_start_note,
    read_launched_rank,
)
from echelon.launch.gpus import GPU_DEFAULTS, find_driver_gpus, gpu_environment
from echelon.launch.host import available_memory_bytes, interface_problem, num_usable_cores
from echelon.planner.view.text_layout import fill_text


def doctor(*, json: Json = False) -> int:
    """Check that this machine can plan, prove and train; exit 3 where it cannot."""
    findings = list(examine_machine(Path.cwd()))
    problems = [finding.problem for finding in findings if finding.problem]
    lacking = any(finding.stops_runs for finding in findings)
    if json:
        found = {finding.name.replace(" ", "_"): finding.facts for finding in findings}
        told = [problem.to_json() for problem in problems]
        result = {"version": __version__, "ok": not lacking, "findings": found, "problems": told}
        print_json("doctor", result)
    else:
        for finding in findings:
            mark = "ok" if finding.problem is None else "NO" if finding.needed else "hm"
            line = f"{mark}  {finding.name:<{_NAME}}{finding.text}"
            rest = " " * (len(mark) + 2 + _NAME)
            print(fill_text(line, rest=rest, columns=page_columns(WIDEST)))
        if problems:
            print_error(EnvironmentProblem(problems))
    return EnvironmentProblem.exit_code if lacking else 0


_NAME = 16  # columns
MIN_PYTHON = (3, 11)  # version
MIN_TORCH = (2, 11)  # version
MIN_MEMORY_BYTES = 2 * 2**30
MIN_SHARED_MEMORY_BYTES = 2**30
MIN_DISK_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
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


def examine_machine(folder: Path) -> Iterator[MachineCheck]:
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
    yield launcher(os.environ)
    yield gpu_variables(os.environ, used=has_gpus)
    yield disk(folder)


def python() -> MachineCheck:
    """Find the interpreter."""
    version = platform.python_version()
    return MachineCheck(
        name="python",
        text=f"{version} on {platform.system()} {platform.machine()}",
        facts={
            "version": version,
            "system": platform.system(),
            "release": platform.release(),
            "architecture": platform.machine(),
            "executable": sys.executable,
        },
        problem=None
        if sys.version_info[:2] >= MIN_PYTHON
        else rules.PYTHON_VERSION.problem(
            f"this is Python {version}; Echelon needs 3.11 or later",
            suggestions=("3.11", "3.12", "3.13"),
        ),
    )


def find_gpus() -> MachineCheck:
    """Find NVIDIA GPUs by the driver, which needs no torch."""
    found = find_driver_gpus()
    devices = [{"name": name, "memory_bytes": memory} for name, memory in found.gpus]
    names = ", ".join(sorted({name for name, _ in found.gpus}))
    text = f"{len(devices)} x {names}" if devices else "none; ranks use the CPU"
    return MachineCheck(name="gpus", text=text, facts={"driver": found.driver, "devices": devices})


def torch_and_backends(*, needs_nccl: bool) -> Iterator[MachineCheck]:
    """Find torch and the backends that ranks can talk over."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield MachineCheck(
            name="torch",
            text="not installed",
            facts={"version": None},
            problem=rules.TORCH_INSTALLED.problem(
                f"torch cannot be imported ({error}); proving and training need it",
                suggestions=(install_command("train"),),
            ),
        )
        return
    version = torch.__version__
    recent = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= MIN_TORCH
    older = (
        None
        if recent
        else rules.TORCH_VERSION.problem(
            f"torch {version} is older than 2.11", suggestions=("pip install 'torch>=2.11'",)
        )
    )
    extras = {name: _version(name) for name in ("numpy", "safetensors", "tokenizers", "pyarrow")}
    yield MachineCheck(
        name="torch",
        text=f"{version}, {torch.get_num_threads()} threads",
        facts={"version": version, "cuda": torch.version.cuda, "packages": extras},
        problem=older,
    )
    found = dist.is_available()
    backends = {
        "gloo": found and dist.is_gloo_available(),
        "nccl": found and dist.is_nccl_available(),
    }
    wanted = "nccl" if needs_nccl else "gloo"
    yield MachineCheck(
        name="backends",
        text=", ".join(name for name, there in backends.items() if there) or "none",
        facts=backends,
        problem=None
        if backends[wanted]
        else rules.BACKEND_AVAILABLE.problem(f"this torch {version} is built without {wanted}"),
        needed=not backends["gloo"],
    )


def cores() -> MachineCheck:
    """Find how many cores this process may use, which a container may make fewer."""
    usable = num_usable_cores()
    total = os.cpu_count() or usable
    return MachineCheck(
        name="cores", text=f"{usable:g} usable of {total}", facts={"usable": usable, "total": total}
    )


def memory() -> MachineCheck:
    """Find how much memory ranks could take now."""
    available = available_memory_bytes()
    total = psutil.virtual_memory().total
    return MachineCheck(
        name="memory",
        text=f"{binary_bytes(available)} free of {binary_bytes(total)}",
        facts={"available_bytes": available, "total_bytes": total},
        problem=None
        if available >= MIN_MEMORY_BYTES
        else rules.ENOUGH_MEMORY.problem(
            f"{binary_bytes(available)} of memory is free; a run of a few ranks needs "
            f"{binary_bytes(MIN_MEMORY_BYTES)}"
        ),
        needed=False,
    )


def shared_memory(*, needed_by_nccl: bool, path: Path = Path("/dev/shm")) -> MachineCheck:
    """Find the room in /dev/shm, which NCCL uses between the GPUs of one machine."""
    if not path.is_dir():
        return MachineCheck(
            name="shared memory", text=f"no {path} here", facts={"free_bytes": None}
        )
    free = shutil.disk_usage(path).free
    return MachineCheck(
        name="shared memory",
        text=f"{binary_bytes(free)} free",
        facts={"free_bytes": free},
        problem=None
        if not needed_by_nccl or free >= MIN_SHARED_MEMORY_BYTES
        else rules.SHARED_MEMORY.problem(
            f"{path} has {binary_bytes(free)}; NCCL on this machine wants "
            f"{binary_bytes(MIN_SHARED_MEMORY_BYTES)}"
        ),
        needed=False,
    )


def ports() -> MachineCheck:
    """Find whether ranks may listen and connect on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return MachineCheck(
            name="ports",
            text="none",
            facts={"loopback": False},
            problem=rules.PORT_AVAILABLE.problem(f"cannot listen on 127.0.0.1: {error}"),
        )
    return MachineCheck(name="ports", text="loopback works", facts={"loopback": True})


def gloo_interface(resolve: Callable[[str], str] = socket.gethostbyname) -> MachineCheck:
    """Find the interface that Gloo would listen at."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    facts: dict[str, object] = {"interfaces": interfaces, "GLOO_SOCKET_IFNAME": chosen}
    if chosen is not None:
        return MachineCheck(
            name="gloo interface",
            text=chosen,
            facts=facts,
            problem=interface_problem(chosen),
        )
    host = socket.gethostname()
    try:
        address = resolve(host)
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        problem = rules.GLOO_INTERFACE.problem(
            f"the name of this host, {host}, does not lead to an address of it: {error}",
            key="GLOO_SOCKET_IFNAME",
            suggestions=interfaces,
        )
        return MachineCheck(
            name="gloo interface", text="none", facts=facts, problem=problem, needed=False
        )
    name = next((n for n, addresses in interfaces.items() if address in addresses), "loopback")
    return MachineCheck(
        name="gloo interface",
        text=f"{name} ({address})",
        facts={**facts, "address": address, "interface": name},
    )


def launcher(environment: Mapping[str, str]) -> MachineCheck:
    """Find which rank a launcher made of this process, and by which variables."""
    read = {name: environment[name] for name in LAUNCH_VARIABLES if environment.get(name)}
    try:
        place = read_launched_rank(environment) if is_launched(environment) else None
    except EnvironmentProblem as error:
        text = ", ".join(f"{name}={value}" for name, value in read.items())
        return MachineCheck(
            name="launcher", text=text, facts={"variables": read}, problem=error.problems[0]
        )
    if place is None:
        note = local_start_note(environment)
        return MachineCheck(
            name="launcher",
            text=f"none, ranks start here{note and ': '}{note}",
            facts={"variables": read, "launcher": None},
        )
    return MachineCheck(
        name="launcher",
        text=f"{place.launcher}: rank {place.rank} of {place.world_size}, local rank "
        f"{place.local_rank}, meeting at {place.master_addr}:{place.master_port}",
        facts={"variables": read, **asdict(place)},
    )


def gpu_variables(environment: Mapping[str, str], *, used: bool) -> MachineCheck:
    """Find what ranks on GPUs get from the environment: what the user set, and our defaults."""
    defaults = gpu_environment(environment)
    known = {name for one in GPU_DEFAULTS for name in (one.name, *one.other_names)}
    set_here = {name: environment[name] for name in sorted(known) if environment.get(name)}
    told = [f"{name}={value} (set here)" for name, value in set_here.items()]
    told += [f"{name}={value}" for name, value in defaults.items()]
    return MachineCheck(
        name="gpu variables",
        text=", ".join(told) if used else f"{len(told)} for ranks on GPUs; there are none here",
        facts={"set": set_here, "defaults": defaults},
    )


def disk(folder: Path) -> MachineCheck:
    """Find the room for checkpoints in `folder`, and whether it may be written to."""
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    what = f"has {binary_bytes(free)} free" if writable else "is not writable"
    return MachineCheck(
        name="disk",
        text=f"{binary_bytes(free)} free, {'writable' if writable else 'read-only'}",
        facts={"folder": str(folder), "free_bytes": free, "writable": writable},
        problem=None
        if writable and free >= MIN_DISK_BYTES
        else rules.DISK_SPACE.problem(f"the folder {folder} {what}", key="train.runs_dir"),
        needed=False,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
