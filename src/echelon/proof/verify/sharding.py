# SPDX-License-Identifier: Apache-2.0
"""What a program was asked to shard beside what its ranks hold: numbers do not tell these apart.

A replica of everything trains as well as shards of it, and takes as many times the memory. What was
asked for is read: of Accelerate from its environment (it keeps no more where it falls back to
another kind), of DeepSpeed from its engine, which says too what it keeps of each tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from echelon.launch.environment import zero_stage_asked_of_accelerate
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.ranks import INITIAL
from echelon.proof.verify.named_mesh import NamedMesh
from echelon.proof.verify.placement.located import LogicalParameters
from echelon.proof.verify.placement.program import Program
from echelon.proof.verify.placement.torch_store import PARAMETERS

_SHARDS_PARAMETERS = 3
"""The ZeRO stage from which parameters are shared out; the lower ones share optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSharding:
    """Say what is to be shared out, by ZeRO stage (3 for FSDP), and who said so.

    `wrapped` says that modules are under FSDP: it may replicate shards (a hybrid sharding), and
    leave modules out that it is told to ignore. `held` is what an engine that gathers tensors to
    show them really keeps of each: bytes, and those of the whole.
    """

    stage: int
    by: str
    wrapped: bool = False
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


def asked_sharding(program: Program) -> AskedSharding | None:
    """Return what the configuration of a rank's program asks for; None where it says nothing."""
    stage = getattr(program.engine, "zero_optimization_stage", None)
    if stage is not None and stage() >= _SHARDS_PARAMETERS:
        held = dict(_kept_by_deepspeed(program))
        return AskedSharding(stage=stage(), by=f"the engine's ZeRO stage {stage()}", held=held)
    if stage is not None or "accelerate" not in sys.modules:
        return None
    asked, by = zero_stage_asked_of_accelerate()
    wrapped = any(
        isinstance(inner, FSDPModule | FullyShardedDataParallel)
        for module in program.modules
        for inner in module.modules()
    )
    return AskedSharding(stage=asked, by=by, wrapped=wrapped) if asked else None


def _kept_by_deepspeed(program: Program) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what each rank keeps of a parameter between uses, its padding left out."""
    for one in program.parameters():
        parameter: Any = one.parameter
        kept = getattr(parameter, "ds_tensor", None)
        if kept is not None:
            target = program.locate(one, parameter.ds_shape)
            numbers = parameter.element_size(), int(parameter.ds_numel)
            size = min(int(kept.numel()), numbers[1]) * numbers[0]
            for name in target.names:
                yield name, (size, numbers[0] * numbers[1])


@dataclass(frozen=True, slots=True)
class HeldCopies:
    """Say what a rank holds of a tensor, and which ranks hold the same of it."""

    rank: int
    num_bytes: int
    ranks: tuple[int, ...]
    num_holders: int

    def problem(self, by: str) -> str:
        """Return what is wrong with it; nothing where no other rank holds the same."""
        others = [str(rank) for rank in self.ranks if rank != self.rank]
        if not others:
            return ""
        shard = -(-self.num_bytes // len(self.ranks))
        so = "so do ranks" if len(others) > 1 else "so does rank"
        return (
            f"rank {self.rank} holds {self.num_bytes} bytes of it, and {so} "
            f"{', '.join(others)}: {by} asks for shards of {shard} bytes"
        )


def sharding_checks(
    logical: LogicalParameters, asked: AskedSharding | None, held: Mapping[str, HeldCopies]
) -> Iterator[Check]:
    """Compare what ranks hold of each tensor with what was asked for."""
    if asked is None:
        return
    shared = any(len(one.ranks) < one.num_holders for one in held.values())
    for position, (name, shape) in enumerate(logical.shapes.items()):
        if math.prod(shape) == 1:
            continue
        if name in asked.held:
            kept, whole = asked.held[name]
            text = f"each rank keeps {kept} of {whole} bytes; {asked.by} asks for shards"
            yield exact_check(INITIAL, name, text * (kept >= whole), position)
        elif name in held:
            problem = "" if asked.wrapped and shared else held[name].problem(asked.by)
            yield exact_check(INITIAL, name, problem, position)


def explain_sharding(mesh: NamedMesh, held: HeldCopies | None, problem: str) -> ProofFinding:
    """Return the finding of a tensor that is whole where shards were asked for, with its axis."""
    ranks = held.ranks if held is not None else tuple(range(mesh.world_size))
    axis = next((" and ".join(axes) for axes in mesh.axis_sets() if _spans(mesh, axes, ranks)), "")
    return ProofFinding("not sharded", problem, axis, value=float(len(ranks)), ranks=ranks)


def _spans(mesh: NamedMesh, axes: tuple[str, ...], ranks: tuple[int, ...]) -> bool:
    return mesh.group(ranks[0], axes) == ranks


def kind_of(asked: AskedSharding) -> str:
    """Return the captured values that are to be shared out: parameters, or moments."""
    return PARAMETERS if asked.stage >= _SHARDS_PARAMETERS else "exp_avg"
