# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a Plan hold at their peak, place by place.

Of our trainer it is the highest moment of a step, all that is there together
(`cost/peak/rank_peak.py`); ranks at a place that are alike are computed once.

Another trainer than ours has other bytes for the same elements, by its closed forms: a block keeps
what `cost/peak/fullest_rank.py` says, or its input where it is recomputed; where backward is split
all of it waits for W. What runs has the trainer's buffers, the logits and, where blocks are
recomputed, one block beside. Its peak is that of its activations, over the actions of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import Num
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.peak.rank_peak import PeakWalk, resting_terms
from echelon.cost.seconds.stages import PipelineOrder
from echelon.layout.stage import RankPart, StagePart, rank_part
from echelon.schedule.flat_schedule import KINDS, FlatSchedule


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Hold what a microbatch keeps on a stage after F and after B, and at most in each action.

    `action_peaks` are in the order of KINDS.
    """

    forward: float
    weight_gradient: float
    action_peaks: tuple[float, float, float, float]


StageSizes = Callable[[StagePart], StageBytes]
"""What says the bytes of a microbatch on a stage of a trainer that is not ours."""


def peak_bytes_by_place(plan: Plan, sizes: StageSizes | None = None) -> list[dict[str, float]]:
    """Return the bytes of the first rank at each place of the pipeline, by term."""
    if sizes is None:
        return [dict(one.terms) for one in PeakWalk(plan).by_place()]
    order, lists = PipelineOrder.from_plan(plan), dict[int, FlatSchedule]()
    stages: dict[object, StageBytes] = {}
    found: list[dict[str, float]] = []
    for pp in range(plan.mesh.pp):
        part = rank_part(plan, pp)
        kinds = [_kind(plan, stage) for stage in part.stages]
        for stage, kind in zip(part.stages, kinds, strict=True):
            if kind not in stages:
                stages[kind] = sizes(stage)
        peak = _peak_of_step(part, order, lists, [stages[kind] for kind in kinds])
        resting = resting_terms(plan, plan.mesh.rank({Axis.PP: pp}))
        found.append({**resting, "activations": peak})
    return found


def _kind(plan: Plan, stage: StagePart) -> tuple[object, ...]:
    """Return what decides the bytes of a stage: how many blocks of each kind, and its ends."""
    recompute = plan.layout.recompute
    kinds = tuple(
        (
            plan.model.layer_has_experts(layer),
            plan.model.layer_kind(layer),
            recompute.recomputes(layer),
        )
        for layer in stage.blocks
    )
    return stage.first, stage.last, stage.microbatches, kinds


def _peak_of_step(
    part: RankPart,
    order: PipelineOrder,
    lists: dict[int, FlatSchedule],
    sizes: Sequence[StageBytes],
) -> float:
    """Return the most that the activations of a place take; `lists` are those known so far.

    Rounds of a pipeline are alike, so a few tell of all: where steps that are a few rounds longer
    have the same peak, so has every longer one.
    """

    def peak(count: int) -> float:
        if count not in lists:
            lists[count] = order.lanes(count)
        return _peak_activations(part, lists[count], sizes)

    if len(order.lengths) > 2:
        few = order.lengths[-3:]
        peaks = [peak(count) for count in few]
        if peaks[0] == peaks[-1] == peaks[1]:
            return peaks[-1]
    return peak(order.num_microbatches)


def _peak_activations(part: RankPart, flat: FlatSchedule, sizes: Sequence[StageBytes]) -> float:
    """Return the most that the activations of a place take, over the actions of its list."""
    keeps = np.zeros(4 * flat.num_stages)
    own, running = keeps.copy(), keeps.copy()
    for stage, size in zip(part.stages, sizes, strict=True):
        at = [place * flat.num_stages + stage.stage for place in range(len(KINDS))]
        keeps[at] = (
            size.forward,
            size.weight_gradient - size.forward,
            -size.weight_gradient,
            -size.forward,
        )
        own[at] = 0.0, size.forward, size.weight_gradient, size.forward
        running[at] = size.action_peaks
    row: NDArray[np.int64] = np.array(flat.rows[part.pp_rank], dtype=np.int64)
    each = keeps[row]
    peaks = np.cumsum(each) - each - own[row] + np.maximum(own, running)[row]
    return float(peaks.max(initial=0.0))


def other_trainer_stage_bytes(plan: Plan, work: CostInputs) -> Callable[[StagePart], StageBytes]:
    """Return what gives the bytes of a microbatch on a stage."""
    blocks = {
        kind: plain_number(saved_bytes_of_block(work, mixture=kind)) for kind in (False, True)
    }
    cut = plan.mesh.tp if plan.layout.sequence_parallel else 1
    entering = plain_number(work.element * work.tokens) * plan.model.hidden / cut
    closed = {name: plain_number(value) for name, value in fullest_rank_bytes(work).terms.items()}
    tokens, width = plain_number(work.tokens), plain_number(work.model.vocab) / plan.mesh.tp
    logits = plain_number(work.software.logit_held) * tokens * width

    def of_stage(stage: StagePart) -> StageBytes:
        kept = waiting = 0.0
        for layer in stage.blocks:
            whole = blocks[plan.model.layer_has_experts(layer)]
            kept += entering if plan.layout.recompute.recomputes(layer) else whole
            waiting += whole
        running = kept + closed["working"] + logits * stage.last
        return StageBytes(kept, waiting, (running, running, waiting, running))

    return of_stage


def state_byte_ratios(plan: Plan, work: CostInputs) -> Mapping[str, float]:
    """Return how many times as many bytes each kind of model state takes as in our trainer."""
    precision = plan.mathematics.precision
    master = DTYPE_BYTES[precision.master]
    states = len(OPTIMIZERS[plan.mathematics.optimizer.kind].state) + precision.has_master
    rest = plain_number(work.software.parameter_bytes)
    wider = rest - plain_number(work.element) if rest else 0.0
    return {
        "gradients": plain_number(work.software.gradient_bytes) / DTYPE_BYTES[precision.gradients],
        "optimizer": (plain_number(work.software.state_bytes) + wider) / (master * states),
    }


def plain_number(value: Num) -> float:
    """Return a quantity of one plan as a plain number, the first of an array."""
    return float(np.asarray(value).reshape(-1)[0])
