"""What the ranks of a Plan hold at their peak: the exact lists of `cost/`, place by place.

Closed forms take every rank for one with the most blocks. Here each place of the pipeline has its
own stages: model state is that of `cost/bytes/held.py`, what a step gathers and sums beside it that
of `cost/bytes/transient.py`, and activations the most that `cost/activations/timeline.py` gives
over the actions of the schedule. Ranks whose stages are alike are computed once.

Another trainer than ours has other bytes for the same elements, by its closed forms: a block keeps
what `cost/bytes/fullest_rank.py` says, or its input where it is recomputed; where backward is split
all of it waits for W. What runs has the trainer's buffers, the logits and, where blocks are
recomputed, one block beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.activations.numbers import ActivationNumbers, total_saved_bytes
from echelon.cost.activations.peaks import backward_peak, forward_peak
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.bytes.fullest_rank import fullest_rank_bytes
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.terms import HeldTerm
from echelon.cost.bytes.transient import transient_terms
from echelon.cost.seconds.events import PipelineOrder
from echelon.cost.seconds.inputs import CostInputs
from echelon.cost.seconds.numbers import Num
from echelon.layout.stage import RankPart, StagePart, rank_part
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.flat_schedule import KINDS, FlatSchedule

STATE = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master parameters": "optimizer",
    "optimizer state": "optimizer",
}
_GATHERED = "whole units of parameters"
IN_ACTIVATIONS = frozenset({"attention over context ranks", "rows in dispatch"})
"""What the peak of activations has in it."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Hold what a microbatch keeps on a stage after F and after B, and at most in each action.

    `action_peaks` are in the order of KINDS; `loss` is kept by the last stage until a step ends.
    """

    forward: float
    weight_gradient: float
    action_peaks: tuple[float, float, float, float]
    loss: float = 0.0


StageSizes = Callable[[StagePart], StageBytes]
"""What says the bytes of a microbatch on a stage of a trainer that is not ours."""


def peak_bytes_by_place(plan: Plan, sizes: StageSizes | None = None) -> list[dict[str, float]]:
    """Return the bytes of the first rank at each place of the pipeline, by term."""
    order, lists = PipelineOrder.from_plan(plan), dict[int, FlatSchedule]()
    state: dict[object, dict[str, float]] = {}
    stages: dict[object, StageBytes] = {}
    found: list[dict[str, float]] = []
    for pp in range(plan.mesh.pp):
        part = rank_part(plan, pp)
        kinds = [_kind(plan, stage) for stage in part.stages]
        alike = (part.mirrored, *kinds)
        if alike not in state:
            state[alike] = _state(plan, pp)
        if sizes is None and _passes_through(part):
            activations = RankActivations(plan, plan.mesh.rank({Axis.PP: pp}))
            peak = max((float(np.max(one.peak)) for one in activations.actions()), default=0.0)
        else:
            for stage, kind in zip(part.stages, kinds, strict=True):
                if kind not in stages:
                    stages[kind] = sizes(stage) if sizes else _of_stage(plan, pp, stage.stage)
            peak = _peak_of_step(part, order, lists, [stages[kind] for kind in kinds])
        found.append({**state[alike], "activations": peak})
    return found


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
    for term in _on_device(plan, transient_terms(plan, pp)):
        if term.name not in IN_ACTIVATIONS:
            found["gathered" if term.name == _GATHERED else "buffers"] += term.bytes
    return found


def _on_device(plan: Plan, terms: tuple[HeldTerm, ...]) -> Iterator[HeldTerm]:
    """Yield what rests in the memory of a device; a CPU's is the memory of its host."""
    pools = {"device", "host"} if plan.cluster.backend == "gloo" else {"device"}
    return (term for term in terms if term.pool in pools)


def _peak_of_step(
    part: RankPart,
    order: PipelineOrder,
    lists: dict[int, FlatSchedule],
    sizes: Sequence[StageBytes],
) -> float:
    """Return the most that the activations of a place take; `lists` are those known so far.

    Rounds of a pipeline are alike, so a few tell of all: where steps that are a few rounds longer
    each have a peak that is higher by no more than the losses of these microbatches, which stay
    until the step ends, so has every longer one.
    """

    def peak(count: int) -> float:
        if count not in lists:
            lists[count] = order.lanes(count)
        return _peak_activations(part, lists[count], sizes)

    if len(order.lengths) > 2:
        few = order.lengths[-3:]
        peaks = [peak(count) for count in few]
        first, last = ((peaks[i + 1] - peaks[i]) / (few[i + 1] - few[i]) for i in (0, 1))
        if first == last <= sum(size.loss for size in sizes):
            return peaks[-1] + last * (order.num_microbatches - few[-1])
    return peak(order.num_microbatches)


def _peak_activations(part: RankPart, flat: FlatSchedule, sizes: Sequence[StageBytes]) -> float:
    """Return the most that the activations of a place take, over the actions of its list."""
    keeps = np.zeros(4 * flat.num_stages)
    own, running = keeps.copy(), keeps.copy()
    for stage, size in zip(part.stages, sizes, strict=True):
        at = [place * flat.num_stages + stage.stage for place in range(len(KINDS))]
        # A loss stays until the step ends.
        entered = size.forward + size.loss
        keeps[at] = (
            entered,
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


def _passes_through(part: RankPart) -> bool:
    """Return whether an empty stage gives what it was given to the next one on the same rank."""
    here = {stage.stage for stage in part.stages}
    return any(not stage.blocks and stage.stage + 1 in here for stage in part.stages)


def _of_stage(plan: Plan, pp: int, stage: int) -> StageBytes:
    """Return the bytes of a microbatch on a stage of our trainer."""
    found = RankActivations(plan, plan.mesh.rank({Axis.PP: pp}))
    units = found.units(stage, 0)
    numbers = ActivationNumbers.from_plan(plan, plan.mesh.coordinates(found.rank)[Axis.CP])
    kept, waiting = (
        float(np.max(total_saved_bytes(found.kept(Action(kind, stage, 0)))))
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
        kept,
        waiting,
        (forward, split, waiting, backward),
        float(np.max(numbers.statistics_bytes)) * last,
    )


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
