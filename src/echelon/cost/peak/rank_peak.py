"""The most that a rank holds at one time, and what it is then: a walk over the actions of a step.

At each operator of each action these are there together:

    model state     what lives between steps (`cost/bytes/held.py`)
    gathered        units of parameters that are whole then (`whole_units.py`)
    activations     all that microbatches keep, and what the operator works with
    messages        what came from other stages ahead of its use, and what is leaving
    buffers         gradients that fill a bucket or are summed (`gradient_sums.py`), sets of
                    offloaded tensors, the tokens of the step and tables of positions

When backward is over the optimizer has what `update.py` says. The terms of the highest moment add
up to the peak; the rehearsal meets it within 2 % (`tests/rehearsal/test_peaks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.numbers import INDEX_BYTES, ActivationNumbers
from echelon.cost.activations.peaks import Moment
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.bytes.fp8 import first_step
from echelon.cost.bytes.held import held_buckets, held_terms
from echelon.cost.bytes.local_sgd import (
    OUTER_GRADIENTS,
    OUTER_MOMENTUM,
    OUTER_PARAMETERS,
    outer_held,
    outer_step_bytes,
)
from echelon.cost.bytes.terms import Pool
from echelon.cost.bytes.threads import REPLICA_GRADIENTS, REPLICA_PARAMETERS
from echelon.cost.peak.few_rounds import with_as_full_ranks
from echelon.cost.peak.gradient_sums import GradientSums
from echelon.cost.peak.messages import message_counts
from echelon.cost.peak.offload_buffers import offload_buffer_bytes
from echelon.cost.peak.servers import server_peak_buffers, server_terms
from echelon.cost.peak.threads import share_of_replica, with_other_replicas
from echelon.cost.peak.update import most_update_bytes
from echelon.cost.peak.weight_order import WeightOrder, writes_at_end
from echelon.cost.peak.whole_units import WholeUnits
from echelon.layout.buckets import plan_buckets
from echelon.layout.islands import inner_plan, plan_and_rank
from echelon.layout.stage import held_experts, part_of, rank_part, stage_parameters
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.from_plan import schedule_from_plan

STATE: Mapping[str, str] = {
    "parameters": "parameters",
    "codes of parameters": "parameters",
    "secondary slices": "parameters",
    "gradients": "gradients",
    "master parameters": "optimizer",
    "optimizer state": "optimizer",
    OUTER_PARAMETERS: "optimizer",
    OUTER_MOMENTUM: "optimizer",
    OUTER_GRADIENTS: "optimizer",
    REPLICA_PARAMETERS: "parameters",
    REPLICA_GRADIENTS: "gradients",
}
"""The term of each kind of model state."""

TERMS: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "messages",
    "buffers",
)
"""The terms of a peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """Hold the highest moment of a rank in a step."""

    rank: int
    """The rank."""
    terms: Mapping[str, float]
    """What is there at that moment, by term."""
    where: str
    """The moment: an action, a unit of its stage and an operator, or the update."""

    @property
    def bytes(self) -> float:
        """Return all bytes."""
        return sum(self.terms.values())


class PeakWalk:
    """Find the peaks of the ranks of a plan."""

    def __init__(self, plan: Plan) -> None:
        """Take a plan; a few rounds of its pipeline are walked where they tell of all.

        Where whole tensors share a scale in 8 bits, the first step has other products.
        """
        first = first_step(plan)
        self._first_step = None if first is plan else PeakWalk(first)
        self._whole, plan = plan, inner_plan(plan)
        self._plan, self._few = plan, with_as_full_ranks(plan)
        self._schedule = schedule_from_plan(self._few)
        self._numbers: dict[int, ActivationNumbers] = {}

    def peak(self, rank: int) -> RankPeak:
        """Return the highest moment of a rank, in the first step or in those after it."""
        if self._plan.mesh.is_server(rank):
            buffers, where = server_peak_buffers(self._plan, rank)
            held = server_terms(self._plan, rank, STATE)
            terms = dict.fromkeys(TERMS, 0.0) | held | {"buffers": float(buffers)}
            return RankPeak(rank=rank, terms=terms, where=where)
        if self._plan.layout.threads.on:
            alone = PeakWalk(share_of_replica(self._plan)).peak(rank)
            resting = resting_terms(self._plan, rank)
            terms = with_other_replicas(self._plan, rank, alone.terms, resting)
            return RankPeak(rank=rank, terms=terms, where=alone.where)
        place, outer = plan_and_rank(self._whole, rank)[1], outer_step_bytes(self._whole, rank)
        found = self._peak(place, outer)
        terms = dict(found.terms)
        terms["optimizer"] += sum(term.bytes for term in outer_held(self._whole, rank))
        found = replace(found, rank=rank, terms=terms)
        if self._first_step is None:
            return found
        return max(self._first_step.peak(rank), found, key=lambda one: one.bytes)

    def _peak(self, rank: int, outer_bytes: int) -> RankPeak:
        pp = self._few.mesh.coordinates(rank)[Axis.PP]
        row = self._schedule.actions[pp]
        counts = message_counts(self._few)[pp] if self._few.mesh.pp > 1 else (0,) * len(row)
        numbers = self._numbers_at(self._few.mesh.coordinates(rank)[Axis.CP])
        found = _RankWalk(self._few, rank, numbers).highest(row, counts, outer_bytes)
        terms = dict(found.terms)
        if terms["activations"]:
            terms["activations"] += float(numbers.statistics_bytes) * self._more_losses(pp)
        terms["buffers"] += self._tokens()
        return RankPeak(rank=rank, terms=terms, where=found.where)

    def by_place(self) -> list[RankPeak]:
        """Return the highest moments of the first rank at each place of the pipeline.

        The first server, which has no less than the others, comes last.
        """
        mesh = self._whole.mesh
        ranks = [mesh.rank({Axis.PP: pp}) for pp in range(mesh.pp)]
        return [self.peak(rank) for rank in (*ranks, *mesh.server_ranks[:1])]

    def _numbers_at(self, cp_rank: int) -> ActivationNumbers:
        if cp_rank not in self._numbers:
            self._numbers[cp_rank] = ActivationNumbers.from_plan(self._few, cp_rank)
        return self._numbers[cp_rank]

    def _more_losses(self, pp_rank: int) -> int:
        """Return how many losses are not walked; all of them stay until a step ends."""
        whole, few = (
            sum(stage.microbatches for stage in rank_part(plan, pp_rank).stages if stage.last)
            for plan in (self._plan, self._few)
        )
        return whole - few

    def _tokens(self) -> int:
        """Return the bytes of the tokens and labels of a step."""
        return 2 * INDEX_BYTES * self._plan.local_tokens * self._plan.num_microbatches


@dataclass(frozen=True, slots=True)
class _Beside:
    """Say what there is beside an action, in bytes."""

    action: str
    activations: float
    messages: float


class _RankWalk:
    """The walk of one rank."""

    def __init__(self, plan: Plan, rank: int, numbers: ActivationNumbers) -> None:
        self._plan, self._rank = plan, rank
        self._part = part_of(plan, rank)
        buckets = plan_buckets(plan, self._part)
        self._buckets = buckets
        self._activations = RankActivations(plan, rank, numbers=numbers)
        self._sums = GradientSums(plan, self._part, buckets)
        self._whole = WholeUnits(plan, self._part, buckets)
        self._stream = float(numbers.stream)
        self._fused_norm = bool(numbers.fused_norm)
        self._orders: dict[int, WeightOrder] = {}
        self._highest_of: dict[tuple[ActionKind, int], Moment] = {}
        self._best = -1.0
        self._highest: dict[str, float] = {}
        self._where = ""
        self._beside = _Beside("", 0.0, 0.0)

    def highest(
        self, row: Sequence[Action], counts: Sequence[int], outer_bytes: int = 0
    ) -> RankPeak:
        """Return the highest moment of the actions of `row`, beside so many messages of each.

        After the update outer steps of local SGD may have `outer_bytes`.
        """
        last = {
            action.stage: place
            for place, action in enumerate(row)
            if action.kind in (ActionKind.W, ActionKind.BW)
        }
        steps = self._activations.walk(row)
        for place, (step, count) in enumerate(zip(steps, counts, strict=True)):
            action = step.action
            self._beside = _Beside(str(action), float(step.others), count * self._stream)
            self._see("", "", float(step.own))
            if action.kind in (ActionKind.W, ActionKind.BW):
                self._sums.start_backward(action.stage, last=last[action.stage] == place)
            if not (self._whole.any or self._sums.takes_part):
                self._see_highest(action, step.moments)
            elif action.kind is ActionKind.F:
                self._forward(step.moments)
            else:
                self._backward(action, step.moments)
        self._beside = _Beside("the end of backward", 0.0, 0.0)
        self._sums.finish()
        self._see("", "", 0.0)
        self._whole.end_pass()
        self._beside = _Beside("update", 0.0, 0.0)
        served = self._plan.mesh.servers > 0
        update = 0 if served else most_update_bytes(self._plan, self._rank, self._buckets)
        self._see("", "", 0.0, update)
        self._beside = _Beside("outer steps", 0.0, 0.0)
        self._see("", "", 0.0, outer_bytes)
        terms = resting_terms(self._plan, self._rank)
        for name, size in self._highest.items():
            terms[name] += size
        # Buffers stay once they are there, so they are there at every moment.
        reads, pools = self._whole.most_reads, _pools(self._plan)
        terms["buffers"] += offload_buffer_bytes(self._plan, self._buckets, reads, pools)
        return RankPeak(rank=self._rank, terms=terms, where=self._where)

    def _see_highest(self, action: Action, moments: Sequence[Moment]) -> None:
        """Look at the highest moment alone, where nothing but activations changes."""
        key = (action.kind, action.stage)
        if key not in self._highest_of and moments:
            self._highest_of[key] = max(moments, key=lambda one: float(one.bytes))
        if key in self._highest_of:
            highest = self._highest_of[key]
            self._see(highest.unit, highest.operator, float(highest.bytes))

    def _forward(self, moments: Sequence[Moment]) -> None:
        unit = ""
        for one in moments:
            if one.unit != unit:
                unit = one.unit
                self._whole.enter(unit)
            self._see(one.unit, one.operator, float(one.bytes))
            if not one.operator:
                self._whole.leave(unit)

    def _backward(self, action: Action, moments: Sequence[Moment]) -> None:
        writes = action.kind in (ActionKind.W, ActionKind.BW)
        gathers = action.kind is not ActionKind.W
        order = self._order(action.stage)
        written = order.by_operator if action.kind is ActionKind.W else order.whole
        unit = ""
        for one in moments:
            if one.unit != unit and gathers:
                self._whole.leave_backward(unit)
                self._whole.enter_backward(one.unit)
            unit = one.unit
            at_end = writes_at_end(one.operator, fused_norm=self._fused_norm)
            if at_end:
                self._see(unit, one.operator, float(one.bytes))
            if writes and one.backward:
                for name in written.get((unit, one.operator), ()):
                    self._sums.write(name)
            if not at_end:
                self._see(unit, one.operator, float(one.bytes))
        if gathers:
            self._whole.leave_backward(unit)

    def _order(self, stage: int) -> WeightOrder:
        if stage not in self._orders:
            (part,) = (one for one in self._part.stages if one.stage == stage)
            specs = stage_parameters(self._plan, part, held_experts(self._plan, self._part))
            units = self._activations.units(stage, 0)
            self._orders[stage] = WeightOrder(self._plan, units, specs)
        return self._orders[stage]

    def _see(self, unit: str, operator: str, activations: float, buffers: float = 0.0) -> None:
        """Look at a moment: what an operator has of its microbatch, and all that is beside it."""
        beside, whole = self._beside, self._whole.bytes
        activations, buffers = beside.activations + activations, buffers + self._sums.most()
        total = activations + beside.messages + buffers + whole
        if total > self._best:
            self._best = total
            self._where = ", ".join(word for word in (beside.action, unit, operator) if word)
            self._highest = {
                "activations": activations,
                "messages": beside.messages,
                "buffers": buffers,
                "gathered": float(whole),
            }


def resting_terms(plan: Plan, rank: int) -> dict[str, float]:
    """Return what a device has of a rank at any moment of a step: model state, and buffers."""
    pools = _pools(plan)
    found = dict.fromkeys(TERMS, 0.0)
    pp = plan.mesh.coordinates(rank)[Axis.PP]
    for term in held_terms(plan, held_buckets(plan, pp), rank):
        if term.pool in pools:
            found[STATE[term.name]] += term.bytes
    found["buffers"] += position_table_bytes(plan)
    return found


def _pools(plan: Plan) -> set[Pool]:
    """Return what is in the memory of a device; a CPU's is the memory of its host."""
    return {"device", "host"} if plan.cluster.backend == "gloo" else {"device"}


def position_table_bytes(plan: Plan) -> int:
    """Return the cosines and sines of the positions of a context rank, made once."""
    model = plan.model
    if model.positions != "rope":
        return 0
    width = model.head_dim if model.latent is None else model.latent.rope_dim
    positions = plan.mathematics.sequence_length // plan.mesh.cp
    return positions * width * DTYPE_BYTES[plan.mathematics.precision.parameters]


def rank_peak(plan: Plan, rank: int) -> RankPeak:
    """Return the highest moment of one rank."""
    return PeakWalk(plan).peak(rank)
