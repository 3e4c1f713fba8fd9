# SPDX-License-Identifier: Apache-2.0
"""What is measured with: how many ranks of what device on each of how many nodes.

Ranks are started here, one on each GPU or core, or torchrun has started them on all nodes.
"""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from echelon.config.cluster.devices import device_preset_from_name, device_table
from echelon.core.cluster import PCIE_4_BYTES_PER_S, Backend
from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.core.plan import DType
from echelon.core.rulebook.cluster import CALIBRATION_SAME_DEVICE, RANKS_TO_CALIBRATE
from echelon.core.version import __version__
from echelon.cost.fit.device import UnfittedDevice
from echelon.launch.host import first_words, num_usable_cores, total_memory_bytes

if TYPE_CHECKING:
    from echelon.launch.launched.jobs import RankPlace
    from echelon.launch.local.messages import TargetFunction

MOST_RANKS = 64  # ranks
_LONGEST_NAME = 12  # words of a processor's name


class JobRanks(Protocol):
    """Run jobs on the first n of some ranks: those of a `RankPool`, or of a launch."""

    def run(
        self,
        target: str | TargetFunction,
        argument: object = None,
        world_size: int = 1,
        *,
        timeout_s: float = ...,
    ) -> list[Any]:
        """Return ``target(context, argument)`` of the first ranks, in their order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlace:
    """Say what is measured: how many ranks of what device on each node, with how many threads."""

    machine: UnfittedDevice
    ranks: int
    threads: int
    backend: Backend
    dtype: DType
    nodes: int = 1
    hosts: tuple[str, ...] = ()

    def facts(self, window_s: float) -> dict[str, object]:
        """Return what measurements of one machine have in common, and those of others have not."""
        import torch

        return {
            "hosts": self.hosts or (socket.gethostname(),),
            "device": self.machine.name,
            "memory_bytes": self.machine.memory_bytes,
            "cores": num_usable_cores() if self.backend == "gloo" else 0.0,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "threads": self.threads,
            "dtype": self.dtype,
            "window_s": window_s,
            "torch": str(torch.__version__),
            "echelon": __version__,
        }


def place_here(ranks: int | None) -> MeasuredPlace:
    """Return this machine with so many ranks, or with one on each GPU or core."""
    import torch

    if torch.cuda.is_available():
        return _gpus(ranks, torch.cuda.device_count(), torch.cuda.get_device_properties(0))
    cores = num_usable_cores()
    wanted = max(1, round(cores)) if ranks is None else _checked(ranks, MOST_RANKS, "ranks")
    threads = max(1, int(cores) // wanted)
    machine = UnfittedDevice(
        name=_cpu_name(),
        memory_bytes=total_memory_bytes() // wanted,
        dtype="fp32",
        asynchronous=False,
        cores=(cores if cores < wanted else 0.0) if threads == 1 else None,
    )
    return MeasuredPlace(
        machine=machine, ranks=wanted, threads=threads, backend="gloo", dtype="fp32"
    )


def place_of_launch(places: Sequence[RankPlace]) -> MeasuredPlace:
    """Return what the ranks of a launch are on; EnvironmentProblem where nodes are not alike."""
    size = places[0].node_size
    for rank, place in enumerate(places):
        if place.node_size != size or place.local_rank != rank % size or len(places) % size:
            raise EnvironmentProblem(
                RANKS_TO_CALIBRATE.problem(
                    f"rank {rank} is rank {place.local_rank} of {place.node_size} on its node "
                    f"({place.host}), but nodes of {size} ranks in order have rank {rank % size} "
                    "there",
                    set_by="torchrun",
                    suggestions=("torchrun with one --nproc-per-node on all nodes",),
                )
            )
    devices = Counter(place.device for place in places)
    if len(devices) > 1:
        parts = (f"{count} ranks on {name}" for name, count in devices.most_common())
        raise EnvironmentProblem(
            CALIBRATION_SAME_DEVICE.problem(
                f"a cluster file describes one kind of device, and there are {', '.join(parts)}",
                suggestions=("nodes of one kind",),
            )
        )
    hosts = tuple(place.host for place in places[::size])
    return replace(place_here(size), nodes=len(places) // size, hosts=hosts)


def require_ranks_of_launch(ranks: int | None, node_size: int) -> None:
    """Raise ConfigError where other ranks are asked for than torchrun started on a node."""
    if ranks is not None and ranks != node_size:
        raise ConfigError(
            RANKS_TO_CALIBRATE.problem(
                f"--ranks {ranks}: torchrun started {node_size} ranks on this node, and those are "
                "measured",
                key="--ranks",
                set_by=f"--ranks {ranks}",
                suggestions=(f"--nproc-per-node {ranks} of torchrun", "no --ranks"),
            )
        )


def _gpus(ranks: int | None, there: int, properties: Any) -> MeasuredPlace:
    dtype: DType = "bf16" if properties.major >= 8 else "fp16"
    preset = device_preset_from_name(properties.name, properties.total_memory)
    device = device_table(preset) if preset else {}
    machine = UnfittedDevice(
        name=properties.name,
        memory_bytes=properties.total_memory,
        dtype=dtype,
        asynchronous=True,
        units=properties.multi_processor_count,
        peak_flops=device.get("peak_flops", {}).get(dtype),
        memory_bandwidth=device.get("memory_bandwidth"),
        capability=float(f"{properties.major}.{properties.minor}"),
        host_bandwidth=device.get("host_bandwidth", PCIE_4_BYTES_PER_S),
    )
    wanted = there if ranks is None else _checked(ranks, there, "GPUs")
    return MeasuredPlace(machine=machine, ranks=wanted, threads=1, backend="nccl", dtype=dtype)


def _checked(ranks: int, most: int, what: str) -> int:
    if 1 <= ranks <= most:
        return ranks
    raise ConfigError(
        RANKS_TO_CALIBRATE.problem(
            f"--ranks {ranks}: this machine is measured with 1 to {most} {what}",
            key="--ranks",
            set_by=f"--ranks {ranks}",
            suggestions=[f"--ranks {number}" for number in sorted({1, most})],
        )
    )


def _cpu_name() -> str:
    words = first_words(Path("/proc/cpuinfo"))
    if "name" in words:
        named = words[words.index("name") + 2 :]
        end = next((i for i, word in enumerate(named) if word in ("stepping", "cpu")), 0)
        if 0 < end < _LONGEST_NAME:
            return " ".join(named[:end])
    return platform.processor() or "CPU core"
