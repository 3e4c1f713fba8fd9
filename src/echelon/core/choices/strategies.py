# SPDX-License-Identifier: Apache-2.0
"""Strategies by name: what each makes of a plan, and what other frameworks call it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """Name one strategy, the axes that have the degree of its ranks, and its other settings."""

    name: str
    """What `--strategies` takes."""
    axes: tuple[str, ...]
    """Axes of the mesh with this degree; experts (`ep`) lie over the ranks of another axis."""
    others: Mapping[str, str]
    """Settings beside the mesh, as a run file has them."""
    servers: int = 0
    """Parameter servers beside the ranks."""
    about: str
    """What it splits."""

    def settings(self, ranks: int) -> tuple[str, ...]:
        """Return the settings that make a run one of this strategy on `ranks` ranks.

        Parameter servers are ranks beside these, which are their workers.
        """
        mesh = {f"mesh.{axis}": ranks if axis in self.axes else 1 for axis in _AXES}
        mesh["servers.count"] = self.servers
        return tuple(f"{key}={value}" for key, value in {**mesh, **self.others}.items())

    def replicas(self, ranks: int) -> int:
        """Return how many of `ranks` ranks see other samples: replicas that are in sync."""
        return ranks if set(self.axes).intersection(_DATA_AXES) else 1


def _record(name: str, axes: str, about: str, **others: str) -> StrategyRecord:
    settings = {key.replace("__", "."): value for key, value in others.items()}
    return StrategyRecord(name=name, axes=tuple(axes.split()), others=settings, about=about)


STRATEGIES: Mapping[str, StrategyRecord] = {
    record.name: record
    for record in (
        _record("dp", "dp_replicate", "samples", zero__stage="0"),
        _record("zero1", "dp_shard", "samples, optimizer state", zero__stage="1"),
        _record("zero2", "dp_shard", "samples, optimizer state, gradients", zero__stage="2"),
        _record("zero3", "dp_shard", "samples, all model state", zero__stage="3"),
        _record("tp", "tp", "heads and columns of each layer", zero__stage="0"),
        _record(
            "sp",
            "tp",
            "heads and columns, tokens between layers",
            zero__stage="0",
            mesh__sequence_parallel="true",
        ),
        _record("pp", "pp", "layers", zero__stage="0"),
        _record("cp", "cp", "positions, keys on a ring", zero__stage="0", context__kind="ring"),
        _record(
            "gathered", "cp", "positions, keys gathered", zero__stage="0", context__kind="gathered"
        ),
        _record(
            "ulysses",
            "cp",
            "positions, heads in attention",
            zero__stage="0",
            context__kind="ulysses",
        ),
        _record("ep", "dp_shard ep", "samples, experts", zero__stage="1"),
        StrategyRecord(
            name="parameter-server",
            axes=("dp_replicate",),
            others={"zero.stage": "0"},
            about="samples; model and optimizer state over two servers",
            servers=2,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyName:
    """Say what a name of another framework is here.

    `ours` is a name in STRATEGIES, or "" where there is nothing of the kind; `why` says how the two
    compare, or what to take instead.
    """

    name: str
    tool: str
    ours: str
    why: str


def _name(name: str, tool: str, ours: str, why: str) -> StrategyName:
    return StrategyName(name=name, tool=tool, ours=ours, why=why)


TENSORFLOW, PYTORCH = "TensorFlow", "PyTorch"
_ON_THREADS = (
    "ec.threaded(module) computes a module of your own on threads of one process, and dp has a "
    "process for each replica"
)

STRATEGY_NAMES: tuple[StrategyName, ...] = (
    _name("MirroredStrategy", TENSORFLOW, "dp", "a copy of each variable on each device, in sync"),
    _name(
        "MultiWorkerMirroredStrategy",
        TENSORFLOW,
        "dp",
        "the same over several hosts; TF_CONFIG says which process is which rank",
    ),
    _name(
        "CentralStorageStrategy",
        TENSORFLOW,
        "",
        f"variables rest in one place, and each device has a copy for a step: {_ON_THREADS}",
    ),
    _name(
        "ParameterServerStrategy",
        TENSORFLOW,
        "parameter-server",
        "variables rest on servers, from which workers read and to which they send gradients",
    ),
    _name(
        "TPUStrategy",
        TENSORFLOW,
        "",
        "ranks run on CPUs and GPUs; on those take dp, which sums gradients as TPUs do",
    ),
    _name("OneDeviceStrategy", TENSORFLOW, "", "one device is no strategy: leave it out"),
    _name("DataParallel", PYTORCH, "", _ON_THREADS),
    _name("DistributedDataParallel", PYTORCH, "dp", "a process for each replica"),
    _name("DDP", PYTORCH, "dp", "a process for each replica"),
    _name(
        "ZeroRedundancyOptimizer", PYTORCH, "zero1", "optimizer state in slices over the replicas"
    ),
    _name("FullyShardedDataParallel", PYTORCH, "zero3", "all model state in slices"),
    _name("FSDP", PYTORCH, "zero3", "all model state in slices"),
    _name("Horovod", "Horovod", "dp", "gradients averaged over a ring of processes"),
    _name("tensor", "Echelon", "tp", "the long name"),
    _name("pipeline", "Echelon", "pp", "the long name"),
    _name("context", "Echelon", "cp", "the long name"),
    _name("experts", "Echelon", "ep", "the long name"),
    _name("threads", "earlier versions", "", _ON_THREADS),
)
"""Names of other frameworks, and long ones of ours."""


def _plain(name: str) -> str:
    """Return a name without case, dashes, and the word that all of TensorFlow's end in."""
    return re.sub(r"[-_ ]|strategy$", "", name.lower())


_KNOWN: Mapping[str, StrategyName] = {_plain(one.name): one for one in STRATEGY_NAMES}


def known_name(name: str) -> StrategyName | None:
    """Return what another framework's name is here; None where nobody is known to use it."""
    return _KNOWN.get(_plain(name))


def why_no_strategy(name: str) -> str:
    """Return why there is no strategy of a name, which is none of ours."""
    known = known_name(name)
    if known is None or known.ours:
        return f"there is no strategy {name!r}: there are {', '.join(STRATEGIES)}"
    return f"{known.name} of {known.tool} is none here: {known.why}"


def find_strategy(name: str) -> StrategyRecord | None:
    """Return the strategy of a name, ours or another's; None where there is none."""
    own = {_plain(one): record for one, record in STRATEGIES.items()}
    if _plain(name) in own:
        return own[_plain(name)]
    other = known_name(name)
    return None if other is None else STRATEGIES.get(other.ours)
