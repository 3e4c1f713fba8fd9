"""What the ranks of a Plan hold at their peak: the exact lists of `cost/`, place by place.

Closed forms take every rank for one with the most blocks. Here each place of the pipeline has its
own stages: model state is that of `cost/bytes_held.py`, what a step gathers and sums beside it that
of `cost/transient.py`, and activations the most that `cost/activations.py` gives over the actions
of the schedule. Ranks whose stages are alike are computed once.

Another trainer than ours has other bytes for the same elements: `held_elsewhere.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activation_numbers import ActivationNumbers, total
from echelon.cost.activation_peaks import backward_peak, forward_peak
from echelon.cost.activations import RankActivations
from echelon.cost.bytes_held import bytes_held
from echelon.cost.stage import RankPart, StagePart, rank_part
from echelon.cost.terms import HeldTerm
from echelon.cost.transient import held_at_most
from echelon.planner.lanes import KINDS, Lanes, in_lanes, lanes_of
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.of_plan import schedule_of

STATE = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master parameters": "optimizer",
    "optimizer state": "optimizer",
}
GATHERED = "whole units of parameters"
IN_ACTIVATIONS = frozenset({"attention over context ranks", "rows on their way to experts"})
"""What the peak of activations has in it."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Hold what a microbatch keeps on a stage after F and after B, and at most in each action.

    `running` is in the order of KINDS; `loss` is kept by the last stage until a step ends.
    """

    forward: float
    waiting: float
    running: tuple[float, float, float, float]
    loss: float = 0.0


Sizes = Callable[[StagePart], StageBytes]
"""What says the bytes of a microbatch on a stage of a trainer that is not ours."""


def held_by_place(plan: Plan, sizes: Sizes | None = None) -> list[dict[str, float]]:
    """Return the bytes of the first rank at each place of the pipeline, by term."""
    lanes = _lanes(plan)
    state: dict[object, dict[str, float]] = {}
    stages: dict[object, StageBytes] = {}
    found: list[dict[str, float]] = []
    for pp in range(plan.mesh.pp):
        part = rank_part(plan, pp)
        kinds = [_kind(plan, stage) for stage in part.stages]
        alike = (part.mirrored, *kinds)
        if alike not in state:
            state[alike] = _state(plan, pp)
        if sizes is None and _hands_on(part):
            activations = RankActivations(plan, plan.mesh.rank({Axis.PP: pp}))
            peak = max((float(np.max(one.peak)) for one in activations.actions()), default=0.0)
        else:
            for stage, kind in zip(part.stages, kinds, strict=True):
                if kind not in stages:
                    stages[kind] = sizes(stage) if sizes else _of_stage(plan, pp, stage.stage)
            peak = _walked(part, lanes, [stages[kind] for kind in kinds])
        found.append({**state[alike], "activations": peak})
    return found


def _lanes(plan: Plan) -> Lanes:
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        return in_lanes(schedule_of(plan))
    return lanes_of(pipeline.schedule, plan.num_stages, plan.mesh.pp, plan.num_microbatches)


def _kind(plan: Plan, stage: StagePart) -> tuple[object, ...]:
    """Return what decides the bytes of a stage: how many blocks of each kind, and its ends."""
    recompute = plan.layout.recompute
    kinds = tuple(
        (plan.model.layer_has_experts(layer), recompute.recomputes(layer)) for layer in stage.blocks
    )
    return stage.first, stage.last, stage.microbatches, kinds


def _state(plan: Plan, pp: int) -> dict[str, float]:
    """Return model state, and what a step holds beside it and activations at most."""
    found = dict.fromkeys((*STATE.values(), "gathered", "buffers"), 0.0)
    for term in _on_device(plan, bytes_held(plan, plan.mesh.rank({Axis.PP: pp}))):
        found[STATE[term.name]] += term.bytes
    for term in _on_device(plan, held_at_most(plan, pp)):
        if term.name not in IN_ACTIVATIONS:
            found["gathered" if term.name == GATHERED else "buffers"] += term.bytes
    return found


def _on_device(plan: Plan, terms: tuple[HeldTerm, ...]) -> Iterator[HeldTerm]:
    """Yield what rests in the memory of a device; a CPU's is the memory of its host."""
    pools = {"device", "host"} if plan.cluster.backend == "gloo" else {"device"}
    return (term for term in terms if term.pool in pools)


def _walked(part: RankPart, lanes: Lanes, sizes: Sequence[StageBytes]) -> float:
    """Return the most that the activations of a place take, over the actions of its list."""
    keeps = np.zeros(4 * lanes.num_stages)
    own, running = keeps.copy(), keeps.copy()
    for stage, size in zip(part.stages, sizes, strict=True):
        at = [place * lanes.num_stages + stage.stage for place in range(len(KINDS))]
        # A loss stays until the step ends.
        entered = size.forward + size.loss
        keeps[at] = entered, size.waiting - size.forward, -size.waiting, -size.forward
        own[at] = 0.0, size.forward, size.waiting, size.forward
        running[at] = size.running
    row: NDArray[np.int64] = np.array(lanes.rows[part.pp_rank], dtype=np.int64)
    each = keeps[row]
    peaks = np.cumsum(each) - each - own[row] + np.maximum(own, running)[row]
    return float(peaks.max(initial=0.0))


def _hands_on(part: RankPart) -> bool:
    """Return whether an empty stage gives what it was given to the next one on the same rank."""
    here = {stage.stage for stage in part.stages}
    return any(not stage.blocks and stage.stage + 1 in here for stage in part.stages)


def _of_stage(plan: Plan, pp: int, stage: int) -> StageBytes:
    """Return the bytes of a microbatch on a stage of our trainer."""
    found = RankActivations(plan, plan.mesh.rank({Axis.PP: pp}))
    units = found.units(stage, 0)
    numbers = ActivationNumbers.of(plan, plan.mesh.coordinates(found.rank)[Axis.CP])
    kept, waiting = (
        float(np.max(total(found.kept(Action(kind, stage, 0)))))
        for kind in (ActionKind.F, ActionKind.B)
    )
    peaks = (
        forward_peak(units, numbers),
        backward_peak(units, numbers, split=True),
        backward_peak(units, numbers, split=False),
    )
    forward, split, backward = (float(np.max(one)) for one in peaks)
    last = stage == plan.num_stages - 1
    return StageBytes(
        kept, waiting, (forward, split, waiting, backward), float(np.max(numbers.wide)) * last
    )
