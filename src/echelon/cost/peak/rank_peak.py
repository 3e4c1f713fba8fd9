# SPDX-License-Identifier: Apache-2.0
"""The most that a rank holds at one time, and what it is then: a walk over the actions of a step.

At each operator of each action these are there together:

    model state     what lives between steps (`cost/bytes/held.py`)
    gathered        units of parameters that are whole then (`buckets.py`)
    activations     all that microbatches keep, and what the operator works with
    messages        what came from other stages ahead of its use, and what is leaving
    buffers         gradients that fill a bucket or are summed (`buckets.py`), sets of
                    offloaded tensors, the tokens of the step and tables of positions

When backward is over the optimizer has what `update.py` says. The terms of the highest moment add
up to the peak; the rehearsal meets it within 2 % (`tests/rehearsal/test_peaks.py`).

Places of a pipeline whose stages are of the same blocks differ in the order of their actions alone:
they share the walk of the first of them (`place_walk.py`).

All memory of a CPU rank is memory of its host. The host of a GPU holds offloaded slices, and
buffers between the GPU and files (`memory_by_place`).

A parameter server adds up a bucket while those of two more are arriving: of each bucket every
worker sends the range of the server, in the dtype of the reduction. Later an update casts
gradients, a bounded number at a time, where the master copy has another dtype.

Rounds of a pipeline are alike: the walk of a step of few rounds gives the peak of the whole step.

Messages of a pipeline rank are in its memory, action by action (`parallel/pipeline.py`): a receive
is posted a few actions before the one that takes it, with memory of its own; a send is kept until
the window of its channel has gone on. A message to a stage on the same rank is kept until that
stage takes it. Inputs and outputs of an action count with the action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.numbers import ActivationNumbers, activation_numbers_from_plan
from echelon.cost.bytes.held import held_buckets, held_terms
from echelon.cost.bytes.local_sgd import (
    OUTER_GRADIENTS,
    OUTER_MOMENTUM,
    OUTER_PARAMETERS,
    outer_held,
    outer_step_bytes,
)
from echelon.cost.bytes.quantised import first_step
from echelon.cost.bytes.servers import held_by_server
from echelon.cost.bytes.terms import INDEX_BYTES, WIDE_BYTES, Pool
from echelon.cost.bytes.transient import BUCKETS_IN_FLIGHT, arriving_row_bytes
from echelon.cost.peak.place_walk import PlaceWalk
from echelon.cost.peak.update import JOBS_AT_HAND, UPDATE_ELEMENTS, offload_buffer_bytes
from echelon.layout.islands import inner_plan, plan_and_rank
from echelon.layout.slots import plan_server_ranges, server_of_rank
from echelon.layout.stage import RankPart, part_of, pp_rank_of, rank_part
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import RECEIVES_AHEAD, SENDS_SPARE, Channel, ScheduleMessages

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
}
"""The term of each kind of model state."""

TERMS: tuple[str, ...] = (
    *("parameters", "gradients", "optimizer", "gathered"),
    *("activations", "messages", "buffers"),
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
        self._walks: dict[object, PlaceWalk] = {}

    def peak(self, rank: int) -> RankPeak:
        """Return the highest moment of a rank, in the first step or in those after it."""
        if self._plan.mesh.is_server(rank):
            buffers, where = server_peak_buffers(self._plan, rank)
            held = server_terms(self._plan, rank, STATE)
            terms = dict.fromkeys(TERMS, 0.0) | held | {"buffers": float(buffers)}
            return RankPeak(rank=rank, terms=terms, where=where)
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
        part = part_of(self._few, rank)
        walk = self._walk_of(rank, part, numbers)
        found = walk.highest(row, counts, part, outer_bytes)
        terms = dict(walk.resting)
        for name, size in found.terms.items():
            terms[name] += size
        if terms["activations"]:
            terms["activations"] += float(numbers.statistics_bytes) * self._more_losses(pp)
        # Buffers stay once they are there, so they are there at every moment.
        terms["buffers"] += offload_buffer_bytes(
            self._few, walk.buckets, found.reads, pools_of_device(self._few)
        )
        terms["buffers"] += self._tokens() + arriving_row_bytes(self._few, part)
        return RankPeak(rank=rank, terms=terms, where=found.where)

    def _walk_of(self, rank: int, part: RankPart, numbers: ActivationNumbers) -> PlaceWalk:
        """Return the walk of a rank: that of another one where both are alike."""
        alike = _likeness(self._few, rank, part)
        if alike not in self._walks:
            resting = resting_terms(self._few, rank)
            self._walks[alike] = PlaceWalk(self._few, rank, numbers, resting)
        return self._walks[alike]

    def by_place(self) -> list[RankPeak]:
        """Return the highest moments of the first rank at each place of the pipeline.

        The first server, which has no less than the others, comes last.
        """
        mesh = self._whole.mesh
        ranks = [mesh.rank({Axis.PP: pp}) for pp in range(mesh.pp)]
        return [self.peak(rank) for rank in (*ranks, *mesh.server_ranks[:1])]

    def _numbers_at(self, cp_rank: int) -> ActivationNumbers:
        if cp_rank not in self._numbers:
            self._numbers[cp_rank] = activation_numbers_from_plan(self._few, cp_rank)
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


def _likeness(plan: Plan, rank: int, part: RankPart) -> tuple[object, ...]:
    """Return what ranks have in common that hold the same at each action.

    Owners of whole matrices differ, and who sums by messages.
    """
    whole = OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices
    if whole or plan.layout.collectives.algorithm != BACKEND:
        return (rank,)
    recompute, first = plan.layout.recompute, part.stages[0].stage
    stages = tuple(
        (
            stage.stage - first,
            (stage.first, stage.last, stage.microbatches),
            tuple(
                (
                    plan.model.layer_has_experts(layer),
                    plan.model.layer_kind(layer),
                    recompute.recomputes(layer),
                    recompute.operators_of(layer),
                )
                for layer in stage.blocks
            ),
        )
        for stage in part.stages
    )
    cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
    return cp_rank, part.expert_index, part.mirrored, stages


def resting_terms(plan: Plan, rank: int) -> dict[str, float]:
    """Return what a device has of a rank at any moment of a step: model state, and buffers."""
    pools = pools_of_device(plan)
    found = dict.fromkeys(TERMS, 0.0)
    pp = plan.mesh.coordinates(rank)[Axis.PP]
    for term in held_terms(plan, held_buckets(plan, pp), rank):
        if term.pool in pools:
            found[STATE[term.name]] += term.bytes
    found["buffers"] += position_table_bytes(plan, rank_part(plan, pp).blocks)
    return found


def pools_of_device(plan: Plan) -> set[Pool]:
    """Return what is in the memory of a device; a CPU's is the memory of its host."""
    return {"device", "host"} if plan.cluster.backend == "gloo" else {"device"}


def position_table_bytes(plan: Plan, blocks: Sequence[int] = (0,)) -> int:
    """Return the cosines and sines of the positions of a context rank, made once.

    `blocks` are those of the rank: kinds of blocks with another base have tables of their own.
    """
    model = plan.model
    if model.positions != "rope":
        return 0
    width = model.head_dim if model.latent is None else model.latent.rope_dim
    positions = plan.mathematics.sequence_length // plan.mesh.cp
    own = [model.of_layer(block) for block in blocks]
    tables = len({(one.rope_theta, one.rope_scaling, one.rotary) for one in own})
    return tables * positions * width * DTYPE_BYTES[plan.mathematics.precision.parameters]


def server_peak_buffers(plan: Plan, rank: int) -> tuple[int, str]:
    """Return the most bytes beside the model state of a server, and when that is."""
    precision, server = plan.mathematics.precision, server_of_rank(plan, rank)
    sizes = [len(ranges[server]) for ranges in plan_server_ranges(plan)]
    window = BUCKETS_IN_FLIGHT + 1
    arriving = max(sum(sizes[place : place + window]) for place in range(len(sizes)))
    received = plan.mesh.num_workers * arriving * DTYPE_BYTES[precision.reduction]
    longest = min(UPDATE_ELEMENTS, max(sizes))
    squares = longest * WIDE_BYTES * (DTYPE_BYTES[precision.gradients] < WIDE_BYTES)
    casts = precision.gradients != precision.master
    update = max(casts * longest * DTYPE_BYTES[precision.master], squares)
    return (received, "the sums of gradients") if received >= update else (update, "update")


def server_terms(plan: Plan, rank: int, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the model state of a server by the terms that `kinds` names."""
    found: dict[str, float] = {}
    for term in held_by_server(plan, rank):
        kind = kinds[term.name]
        found[kind] = found.get(kind, 0.0) + term.bytes
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceMemory:
    """Hold the peak bytes of each rank at one place of a pipeline, by term."""

    num_ranks: int
    """Ranks at this place."""
    device: Mapping[str, float]
    """Bytes of the memory of a GPU."""
    host: Mapping[str, float]
    """Bytes of the memory of the host."""

    @property
    def device_bytes(self) -> float:
        """Return all bytes of the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Return all bytes of the host."""
        return sum(self.host.values())


def memory_by_place(plan: Plan, ranks: Iterable[int]) -> tuple[PlaceMemory, ...]:
    """Peak bytes of `ranks` by their place of the pipeline; parameter servers come last.

    The first rank at a place represents all ranks there.
    """
    walk, mesh = PeakWalk(plan), plan.mesh
    counts: dict[int, int] = {}
    for rank in ranks:
        place = mesh.pp if mesh.is_server(rank) else pp_rank_of(*plan_and_rank(plan, rank))
        counts[place] = counts.get(place, 0) + 1
    peaks = walk.by_place()
    memory: list[PlaceMemory] = []
    for place, count in sorted(counts.items()):
        peak = {name: size for name, size in peaks[place].terms.items() if size}
        if plan.cluster.backend == "gloo":
            memory.append(PlaceMemory(num_ranks=count, device={}, host=peak))
        else:
            host = _offloaded(plan, peaks[place].rank)
            memory.append(PlaceMemory(num_ranks=count, device=peak, host=host))
    return tuple(memory)


def _offloaded(plan: Plan, rank: int) -> dict[str, float]:
    """Bytes that a rank offloads from its GPU to the host, by term."""
    plan, rank = plan_and_rank(plan, rank)
    buckets = held_buckets(plan, pp_rank_of(plan, rank))
    terms: dict[str, float] = {}
    for term in held_terms(plan, buckets, rank):
        if term.pool == "host":
            terms[term.name] = terms.get(term.name, 0.0) + term.bytes
    plans = [bucket.plan for bucket in buckets]
    if buffers := offload_buffer_bytes(plan, plans, JOBS_AT_HAND, {"host"}):
        terms["buffers"] = float(buffers)
    return terms


ROUNDS = 2
"""Rounds of a pipeline that tell of all."""

LEAST_MICROBATCHES = 3
"""Microbatches of a step of few rounds, where the whole step has as many."""

LEAST_ALONE = 4
"""Microbatches that are walked where there is no pipeline: a sum may still be pending two later."""

LEAST_WALKED = 8
"""Microbatches that are walked of a pipeline at least: of two ranks two rounds are too few for the
messages that are there together."""


def with_few_microbatches(plan: Plan) -> Plan:
    """Return a plan whose steps have two rounds of its pipeline, where they have more.

    Rounds are alike: each microbatch meets the same actions in the same order. A step has at least
    twice as many as there are pipeline ranks then, so that all of them are as full as they get, and
    at least three: the first, one like all between, and the last.
    """
    if plan.layout.pipeline.rows:
        return plan
    period = _period(plan)
    few = plan.num_microbatches % period + max(ROUNDS * period, LEAST_MICROBATCHES)
    return _with_microbatches(plan, few)


def with_as_full_ranks(plan: Plan) -> Plan:
    """Return a plan of few rounds whose ranks hold as many microbatches at a time; or the plan.

    Schedules that run all microbatches forward first hold more of them in a longer step.
    """
    if plan.layout.pipeline.rows:
        return plan
    period = _period(plan)
    least = LEAST_ALONE if plan.mesh.pp == 1 else LEAST_WALKED
    rounds = max(ROUNDS, -(-least // period))
    few = _with_microbatches(plan, plan.num_microbatches % period + rounds * period)
    if few is plan:
        return plan
    more = _with_microbatches(plan, few.num_microbatches + period)
    alike = [most_in_flight(schedule_from_plan(one)) for one in (few, more)]
    return few if alike[0] == alike[1] else plan


def most_in_flight(schedule: Schedule) -> list[int]:
    """Return how many passes through a stage each rank has begun and not ended, at most."""
    found: list[int] = []
    for row in schedule.actions:
        now = most = 0
        for action in row:
            now += action.kind is ActionKind.F
            most = max(most, now)
            now -= action.kind in (ActionKind.W, ActionKind.BW)
        found.append(most)
    return found


def _period(plan: Plan) -> int:
    return lcm(plan.mesh.pp, SCHEDULES[plan.layout.pipeline.schedule].microbatch_multiple)


def _with_microbatches(plan: Plan, count: int) -> Plan:
    whole = plan.num_microbatches
    if count >= whole:
        return plan
    sequences = plan.mathematics.global_sequences // whole * count
    return replace(plan, mathematics=replace(plan.mathematics, global_sequences=sequences))


def message_counts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return how many messages each pipeline rank holds beside each of its actions."""
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        return _counts(schedule_from_plan(plan))
    return _built(pipeline.schedule, plan.num_stages, plan.mesh.pp, plan.num_microbatches)


@lru_cache(maxsize=64)
def _built(name: str, stages: int, ranks: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return those of a schedule that a builder makes: many plans of a search have the same."""
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches
    )
    return _counts(schedule)


def _counts(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    traffic = ScheduleMessages.from_schedule(schedule)
    window = send_window(traffic) + SENDS_SPARE
    return tuple(tuple(_of_rank(traffic, window, rank)) for rank in range(schedule.num_ranks))


def _of_rank(traffic: ScheduleMessages, window: int, pp_rank: int) -> Iterator[int]:
    steps, receives = traffic.steps[pp_rank], traffic.receives[pp_rank]
    posted = arriving = local = 0
    leaving: Counter[Channel] = Counter()
    for position, step in enumerate(steps):
        while posted < len(steps) and posted <= position + RECEIVES_AHEAD:
            arriving += len(receives[posted])
            posted += 1
        if step.receive is not None:
            arriving -= 1
        elif step.local_input and step.action.kind is not ActionKind.W:
            local -= 1
        yield arriving + local + sum(leaving.values())
        if step.send is not None:
            channel = step.send.channel
            leaving[channel] = min(leaving[channel] + 1, window)
        elif step.local_output:
            local += 1
