# SPDX-License-Identifier: Apache-2.0
"""What other frameworks call a strategy, and which of ours that is, or why it is none.

Names are read in any spelling: `MirroredStrategy`, `mirrored` and `mirrored_strategy` are one.
Sources: TensorFlow, "Distributed training with TensorFlow" (tf.distribute); PyTorch,
`torch.nn.DataParallel`, `DistributedDataParallel`, `FullyShardedDataParallel`; Horovod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.core.choices.strategies import STRATEGIES, StrategyRecord


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
