# SPDX-License-Identifier: Apache-2.0
"""What a plan takes: seconds of a step and bytes of its fullest rank, by term, with a band.

The terms are those of `cost/seconds/` and `cost/bytes/`, and add up to the totals exactly. The band
is what the trainer leaves open: a step is not shorter than with everything hidden that can be
hidden behind compute, nor longer than with nothing hidden; an allocator holds back nothing, or
twice its usual slack.

To closed forms of bytes comes what our trainer has beside others: where gradients of microbatches
add up in slices (ZeRO 2 and 3), it fills whole buckets of them, one for each update rule, while the
sums of two more travel (`cost/bytes/transient.py`); at stage 3 a bucket is a unit, and of experts
it is large at stage 2 too.

How far estimates are from measured runs, `bench/accuracy/` says.

Bytes of a Plan place by place (`peak_bytes_by_place`): of our trainer they are the highest moment
of a step, all that is there together (`cost/peak/rank_peak.py`); ranks at a place that are alike
are computed once. Another trainer has other bytes for the same elements, by its closed forms: a
block keeps what `cost/peak/fullest_rank.py` says, or its input where it is recomputed; where
backward is split all of it waits for W. Beside that it has the trainer's buffers, the logits and,
where blocks are recomputed, one block. Its peak is that of its activations, over the actions of the
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.cluster import Cluster
from echelon.core.plan import DTYPE_BYTES, Mathematics, Plan
from echelon.cost.activations.closed_forms import BlockKindBytes, saved_bytes_of_block
from echelon.cost.bytes.model_sizes import block_weights, embedding_weights, head_weights
from echelon.cost.bytes.transient import BUCKETS_IN_FLIGHT
from echelon.cost.inputs.cost_inputs import CostInputs, Terms, TrainerConstants
from echelon.cost.inputs.numbers import Num, first_number
from echelon.cost.peak.fullest_rank import PipelineEnds, fullest_rank_bytes
from echelon.cost.peak.rank_peak import PeakWalk, resting_terms
from echelon.cost.seconds.from_plan import cost_inputs_from_plan, peak_flops
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.cost.seconds.stages import PipelineOrder, Stages, simulated_terms
from echelon.cost.seconds.step import step_seconds
from echelon.cost.seconds.trainers import OURS, OVERLAPS
from echelon.cost.seconds.unit_times import UnitTimes, block_kinds, unit_times_by_kind
from echelon.layout.stage import RankPart, StagePart, rank_part
from echelon.schedule.timer import KINDS, FlatSchedule

EXACT = ("parameters", "gradients", "optimizer")
"""Terms of what is held that are counted of every trainer."""
ESTIMATED = ("slack", "context", "nccl")
"""Terms that are estimated even where a run holds what the lists of its plan say."""


def counted_terms(terms: Iterable[str], *, by_lists: bool) -> tuple[str, ...]:
    """Return the terms of what is held that are counted: `by_lists` all but an allocator's."""
    return tuple(name for name in terms if name not in ESTIMATED) if by_lists else EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of a step of a plan, and bytes of its fullest rank, by term."""

    inputs: CostInputs
    """Numbers that the formulas were given; an estimate with other numbers starts from them."""
    seconds: Mapping[str, float]
    """Name of a term -> its seconds in a step."""
    bytes: Mapping[str, float]
    """Name of a term -> its bytes at the peak of the fullest rank."""
    devices: int
    """Number of devices of the plan."""
    tokens: int
    """Tokens of the global batch."""
    model_flops: float
    """FLOPs of the model in a step with full attention, as published figures count them."""
    causal_flops: float
    """The same without the pairs that a causal mask hides."""
    peak_flops: float
    """FLOP/s of a device at its peak, in the dtype of the parameters."""
    by_lists: bool = False
    """Whether bytes are those of the lists that our engine is tested to hold to."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes_held(self) -> float:
        """Return the bytes that the fullest rank holds at its peak."""
        return sum(self.bytes.values())

    @property
    def reserved_bytes(self) -> float:
        """Return what an allocator has reserved of it at most (`torch.cuda.max_memory_reserved`).

        `bytes_held` is what the driver shows: the context and the buffers of collectives, too.
        """
        return self.bytes_held - self.bytes["context"] - self.bytes.get("nccl", 0.0)

    @property
    def allocated_bytes(self) -> float:
        """Return what tensors have of it at most (`torch.cuda.max_memory_allocated`)."""
        return self.reserved_bytes - self.bytes["slack"]

    @property
    def bytes_counted(self) -> float:
        """Return those of the bytes that are counted, not estimated."""
        return sum(self.bytes[name] for name in counted_terms(self.bytes, by_lists=self.by_lists))

    @property
    def tokens_per_s_per_device(self) -> float:
        """Return the tokens of a device in a second."""
        return self.tokens / self.step_s / self.devices

    @property
    def mfu(self) -> float:
        """Return the share of the devices' peak that the model's FLOPs with full attention are.

        Chowdhery et al., PaLM (2022), appendix B: recompute does not count.
        """
        return self.model_flops / (self.step_s * self.devices * self.peak_flops)

    @property
    def causal_mfu(self) -> float:
        """Return `mfu` without the FLOPs of pairs that a causal mask hides."""
        return self.mfu * self.causal_flops / self.model_flops

    @property
    def step_band(self) -> tuple[float, float]:
        """Return how short and how long a step can be, by what is hidden behind compute."""
        now, closed = self.step_s, _step_s(self.inputs)
        hidden, shown = (now + _step_s(self.inputs, share) - closed for share in (1.0, 0.0))
        return min(hidden, now), max(shown, now)

    @property
    def bytes_band(self) -> tuple[float, float]:
        """Return how little and how much is held, by what an allocator holds back."""
        slack, held = self.bytes["slack"], self.bytes_held
        return held - slack, held + slack

    def token_price(self, price_per_device_hour: float) -> float:
        """Return what a million tokens cost."""
        return 1e6 * price_per_device_hour / 3600.0 / self.tokens_per_s_per_device


def estimate_plan(plan: Plan, times: UnitTimes | None = None) -> Estimate:
    """Return what a plan takes in our own trainer: what a search says of it, too.

    A pipeline is timed event by event, by `times` or those of the formulas; bytes are those of the
    plan's lists.
    """
    return with_exact_bytes(plan, estimate_by_events(plan, times=times))


def estimate_by_events(
    plan: Plan, software: TrainerConstants | None = None, times: UnitTimes | None = None
) -> Estimate:
    """Return what a plan takes: a pipeline event by event, bytes by closed forms."""
    work = cost_inputs_from_plan(plan, software)
    found = estimate_from_inputs(work, plan.mathematics, plan.cluster)
    if plan.mesh.pp == 1:
        return found
    times = times or unit_times_by_kind(plan.model, block_kinds(plan), work)
    return with_simulated_terms(
        found, PipelineOrder.from_plan(plan), times, plan.layout.pipeline.stages
    )


def with_simulated_terms(
    found: Estimate, order: PipelineOrder, times: UnitTimes, stages: Stages
) -> Estimate:
    """Return an estimate of a pipeline by closed forms with its actions timed one by one."""
    share = float(np.asarray(found.inputs.machine.share))
    return replace(found, seconds=simulated_terms(found.seconds, order, times, stages, share=share))


def with_exact_bytes(plan: Plan, found: Estimate, *, trainer: str = OURS) -> Estimate:
    """Return an estimate with the bytes of the lists of a Plan; another trainer has its own."""
    if trainer == OURS:
        return replace(_with_bytes_by_place(found, peak_bytes_by_place(plan)), by_lists=True)

    places = peak_bytes_by_place(plan, other_trainer_stage_bytes(plan, found.inputs))
    times = state_byte_ratios(plan, found.inputs)
    closed = {name: found.bytes[name] for name in ("gathered", "buffers")}
    own = [
        {name: size * times.get(name, 1.0) for name, size in terms.items()} | closed
        for terms in places
    ]
    return _with_bytes_by_place(found, own)


def estimate_from_inputs(
    work: CostInputs, mathematics: Mathematics, cluster: Cluster, *, trainer: str = OURS
) -> Estimate:
    """Return what one plan takes whose numbers are those of `work`."""
    return estimates_from_inputs(work, [work], mathematics, cluster, trainer=trainer)[0]


def estimates_from_inputs(
    work: CostInputs,
    parts: Sequence[CostInputs],
    mathematics: Mathematics,
    cluster: Cluster,
    *,
    trainer: str = OURS,
) -> list[Estimate]:
    """Return what several plans take, one of each of `parts`, of which `work` has the arrays."""
    tokens = mathematics.global_sequences * mathematics.sequence_length
    shape, length = mathematics.model, mathematics.sequence_length
    flops, causal = (model_flops_per_token(shape, length, causal=flag) for flag in (False, True))
    count = len(parts)
    seconds = _each(step_seconds(work).terms, count)
    held = _each(closed_form_bytes(work, trainer).terms, count)
    return [
        Estimate(
            inputs=part,
            seconds=seconds[place],
            bytes=held[place],
            devices=round(float(part.layout.devices)),
            tokens=tokens,
            model_flops=flops * tokens,
            causal_flops=causal * tokens,
            peak_flops=peak_flops(cluster, mathematics.precision.parameters),
        )
        for place, part in enumerate(parts)
    ]


def _each(terms: Mapping[str, Num], count: int) -> list[dict[str, float]]:
    """Return terms of so many plans as plain numbers of each."""
    columns = {
        name: np.broadcast_to(np.asarray(value, dtype=float), (count,)).tolist()
        for name, value in terms.items()
    }
    return [{name: column[place] for name, column in columns.items()} for place in range(count)]


def _with_bytes_by_place(estimate: Estimate, places: Sequence[Mapping[str, float]]) -> Estimate:
    """Return an estimate with the bytes of its fullest place, of those that lists give by term.

    What an allocator holds back and a device's context takes come on top, as in closed forms.
    """
    fullest = max(places, key=lambda terms: sum(terms.values()))
    software, used = estimate.inputs.software, sum(fullest.values())
    beside = {"slack": software.slack * used, "context": software.context_bytes}
    beside |= {name: size for name, size in estimate.bytes.items() if name == "nccl"}
    return replace(estimate, bytes={**fullest, **_single(beside)})


def _single(terms: Mapping[str, Num]) -> dict[str, float]:
    """Return terms of one plan as plain numbers."""
    return {name: first_number(value) for name, value in terms.items()}


def _step_s(work: CostInputs, hidden: float | None = None) -> float:
    """Return the seconds of a step, of which so much is hidden as can be (1), or nothing (0)."""
    if hidden is not None:
        software = replace(work.software, **dict.fromkeys(OVERLAPS, hidden))
        work = replace(work, software=software)
    return sum(_single(step_seconds(work).terms).values())


_STATES_ON_DEVICE = 2.0
"""Buckets of offloaded state on a device at once: `zero.offload_buffers` where nobody says more."""


def closed_form_bytes(
    work: CostInputs,
    trainer: str = OURS,
    blocks: BlockKindBytes | None = None,
    ends: PipelineEnds | None = None,
) -> Terms:
    """Return what the fullest rank of a plan of a trainer holds at its peak.

    `blocks` and `ends` are those of `work`, where they are known.
    """
    found = fullest_rank_bytes(work, blocks, ends)
    layout = work.layout
    sums = np.any(np.asarray(layout.zero) >= 2.0)
    in_transfer = np.any(np.asarray(layout.offload) > 0.0)
    if trainer != OURS or not (sums or in_transfer):
        return found
    more: Num = _whole_sums(work) if sums else 0.0
    more = more + (_state_in_transfer(work) if in_transfer else 0.0)
    extra = {"buffers": more, "slack": work.software.slack * more}
    terms = dict(found.terms)
    return Terms(terms=terms | {name: terms[name] + size for name, size in extra.items()})


def _whole_sums(work: CostInputs) -> Num:
    """Return the bytes of gradients that are whole while they are added up in slices."""
    expert = np.any(np.asarray(work.model.experts) > 0.0)
    shared, routed = block_weights(work.model, work.layout, mixture=bool(expert))
    layout, each = work.layout, work.software.gradient_bytes
    # What is whole counts beside the unit that closed forms have for every trainer at stage 3.
    routed = (BUCKETS_IN_FLIGHT + 2.0) * routed
    shared = np.where(np.asarray(layout.zero) >= 3.0, BUCKETS_IN_FLIGHT * shared, 0.0)
    alone = np.asarray(layout.shard) <= 1.0
    return np.where((np.asarray(layout.zero) >= 2.0) & ~alone, each * (routed + shared), 0.0)


def _state_in_transfer(work: CostInputs) -> Num:
    """Return the bytes of optimizer state that is on its way from the host or back.

    A bucket is a block, its routed experts, or an end of the model: whatever is more than
    `zero.bucket_bytes`; two of them are on the device.
    """
    model, layout = work.model, work.layout
    dense, _ = block_weights(model, layout, mixture=False)
    mixed, routed = block_weights(model, layout, mixture=True)
    ends = np.maximum(embedding_weights(model, layout), head_weights(model, layout))
    shared = np.maximum(np.maximum(dense, mixed), ends)
    inner = layout.ep * layout.expert_tp
    cut = np.maximum(1.0, layout.tp * layout.shard / inner)
    largest = np.maximum(shared / layout.shard, routed / cut)
    each = _STATES_ON_DEVICE * work.software.state_bytes * largest
    return np.where(np.asarray(layout.offload) > 0.0, each, 0.0)


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
        kind: first_number(saved_bytes_of_block(work, mixture=kind)) for kind in (False, True)
    }
    cut = plan.mesh.tp if plan.layout.sequence_parallel else 1
    entering = first_number(work.element * work.tokens) * plan.model.hidden / cut
    closed = {name: first_number(value) for name, value in fullest_rank_bytes(work).terms.items()}
    tokens, width = first_number(work.tokens), first_number(work.model.vocab) / plan.mesh.tp
    logits = first_number(work.software.logit_held) * tokens * width

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
    rest = first_number(work.software.parameter_bytes)
    wider = rest - first_number(work.element) if rest else 0.0
    return {
        "gradients": first_number(work.software.gradient_bytes) / DTYPE_BYTES[precision.gradients],
        "optimizer": (first_number(work.software.state_bytes) + wider) / (master * states),
    }
