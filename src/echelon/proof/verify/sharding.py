# SPDX-License-Identifier: Apache-2.0
"""What a program was asked to shard beside what its ranks hold: numbers do not tell these apart.

A replica of everything trains as well as shards of it, and takes as many times the memory. What was
asked for is read: of Accelerate from its environment (it keeps no more where it falls back to
another kind), of DeepSpeed from its engine, which says too what it keeps of each tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from echelon.launch.environment import zero_stage_asked_of_accelerate
from echelon.proof.evidence.captured import SHARDS_PARAMETERS, AskedSharding
from echelon.proof.verify.placement.program import Program


def asked_sharding(program: Program) -> AskedSharding | None:
    """Return what the configuration of a rank's program asks for; None where it says nothing."""
    stage = getattr(program.engine, "zero_optimization_stage", None)
    if stage is not None and stage() >= SHARDS_PARAMETERS:
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
