"""What a microbatch keeps on a stage of another trainer than ours, by the closed forms of it.

A block keeps what `cost/lattice/memory.py` says, or its input where it is recomputed; where
backward is split all of it waits for W. What runs has the trainer's buffers, the logits and, where
blocks are recomputed, one block beside. Its gradients and optimizer state have its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.memory import bytes_of_rank, kept_by_block
from echelon.cost.lattice.numbers import Num
from echelon.cost.stage import StagePart
from echelon.cost.updates import STATE_KINDS
from echelon.planner.held import StageBytes


def stage_sizes(plan: Plan, work: Work) -> Callable[[StagePart], StageBytes]:
    """Return what gives the bytes of a microbatch on a stage."""
    blocks = {kind: _number(kept_by_block(work, mixture=kind)) for kind in (False, True)}
    cut = plan.mesh.tp if plan.layout.sequence_parallel else 1
    entering = _number(work.element * work.tokens) * plan.model.hidden / cut
    closed = {name: _number(value) for name, value in bytes_of_rank(work).terms.items()}
    tokens, width = _number(work.tokens), _number(work.model.vocab) / plan.mesh.tp
    logits = _number(work.software.logit_held) * tokens * width

    def of_stage(stage: StagePart) -> StageBytes:
        kept = waiting = 0.0
        for layer in stage.blocks:
            whole = blocks[plan.model.layer_has_experts(layer)]
            kept += entering if plan.layout.recompute.recomputes(layer) else whole
            waiting += whole
        running = kept + closed["working"] + logits * stage.last
        return StageBytes(kept, waiting, (running, running, waiting, running))

    return of_stage


def scales(plan: Plan, work: Work) -> Mapping[str, float]:
    """Return how many times as many bytes each kind of model state takes as in our trainer."""
    precision = plan.mathematics.precision
    master = DTYPE_BYTES[precision.master]
    states = len(STATE_KINDS[plan.mathematics.optimizer.kind]) + precision.has_master
    return {
        "gradients": _number(work.software.gradient_bytes) / DTYPE_BYTES[precision.gradients],
        "optimizer": _number(work.software.state_bytes) / (master * states),
    }


def _number(value: Num) -> float:
    return float(np.asarray(value).reshape(-1)[0])
