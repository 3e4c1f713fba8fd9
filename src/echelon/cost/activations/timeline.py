# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that a rank keeps, action by action, and the most that it holds at a time.

A microbatch leaves on a stage, after F, what its backward needs; after B (where backward is split)
what W needs; after W or BW nothing but its loss. So what a rank keeps after an action is the sum
over the pairs of a stage and a microbatch that are between F and W then, and the peak is the
largest sum of what is kept before an action and what that action has beside, in the order of the
schedule. Of a recomputed block the input alone is kept, on the device or on the host; its backward
makes all of the block again.

Formulas of what each operator keeps stand in `linear.py` (norms, MLP), `attention.py`, `experts.py`
and `units.py` (embedding, loss). They are exact for the operators of `parallel/`, every storage
counted once, whatever views of it are kept. What is there while operators run is a model of what
PyTorch frees when: within 2 % of what is measured (`tests/walks/plans/bytes_walk.py`).

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4; Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3 (what waits for W).

While a pass runs (`Moment`), operators run one after the other. Forward, what they keep adds up;
backward, it goes again, and in B what waits for W comes in its place. A recomputed block runs
forward again before its backward, and beside its gradients its output and what it was given live
on. What else a rank holds at a moment is in `cost/peak/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from echelon.core.axis import Axis
from echelon.core.model_shape import LayerKind
from echelon.core.plan import Plan
from echelon.cost.activations.attention_working import AttentionRowChunks
from echelon.cost.activations.experts import DISPATCH, EXPERTS, ROUTER, SHARED
from echelon.cost.activations.linear import ATTENTION_DROPOUT, DOWN, MLP_DROPOUT
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    OperatorMemory,
    SavedTensor,
    activation_numbers_from_plan,
    elementwise_max,
    holds,
    total_saved_bytes,
)
from echelon.cost.activations.units import UnitOperators, stage_unit_operators
from echelon.layout.buckets import UNIT_HEAD
from echelon.layout.expert_load import ExpertLoad
from echelon.layout.stage import part_of, plan_of_layer
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.from_plan import schedule_from_plan

StageMicrobatch = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Record what of a step is data: how tokens were routed, and attention of each microbatch.

    `transposed` is whether attention gave its output in another order
    (`cost/activations/numbers.py`), `row_chunks` what its kernels were called for: of a microbatch,
    and the first block of a kind of attention.
    """

    load: ExpertLoad | None = None
    transposed: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    row_chunks: Mapping[tuple[int, int], AttentionRowChunks] = field(
        default_factory=dict[tuple[int, int], AttentionRowChunks]
    )

    @property
    def any(self) -> bool:
        """Return whether microbatches may differ."""
        return self.load is not None or bool(self.transposed or self.row_chunks)

    def numbers(
        self, plan: Plan, cp_rank: int, microbatch: int
    ) -> dict[LayerKind, ActivationNumbers]:
        """Return the numbers of a microbatch for each kind of attention."""
        found: dict[LayerKind, ActivationNumbers] = {}
        for first in plan.model.first_of_kinds:
            key = (microbatch, first)
            own = plan_of_layer(plan, first)
            x = activation_numbers_from_plan(own, cp_rank, self.row_chunks.get(key))
            x = replace(x, transposed=self.transposed.get(key, x.transposed))
            found[plan.model.layer_kind(first)] = x
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBytes:
    """Say what a rank keeps after an action, and at most while it runs."""

    action: Action
    kept: Num
    peak: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMoments:
    """Say what a rank has of activations while an action runs.

    `others` is what it keeps of all but the microbatch at hand on its stage, of which `own` is kept
    when the action begins and `moments` tell the rest. `kept` is all that is kept after it.
    """

    action: Action
    others: Num
    own: Num
    moments: Sequence[Moment]
    kept: Num


class RankActivations:
    """The activations of one rank of a plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        data: StepData | None = None,
        *,
        numbers: ActivationNumbers | None = None,
    ) -> None:
        """Take the routing and the tokens of `data`; without it, balanced ones.

        `numbers` are those of the rank's place among context ranks, where they are known.
        """
        self.plan, self.rank, self._data = plan, rank, data or StepData()
        self._cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
        self._numbers = numbers or activation_numbers_from_plan(plan, self._cp_rank)
        self._stages = {one.stage: one for one in part_of(plan, rank).stages}
        self._empty = [stage for stage, part in self._stages.items() if not part.blocks]
        self._units: dict[StageMicrobatch, tuple[UnitOperators, ...]] = {}
        self._left: dict[tuple[ActionKind, int, int], Num] = {}
        self._moments: dict[tuple[ActionKind, int, int], Sequence[Moment]] = {}

    @property
    def row(self) -> Sequence[Action]:
        """Return the actions of this rank, in order."""
        return schedule_from_plan(self.plan).actions[self.plan.mesh.coordinates(self.rank)[Axis.PP]]

    def units(self, stage: int, microbatch: int) -> tuple[UnitOperators, ...]:
        """Return the units of a stage for one microbatch."""
        key = (stage, microbatch if self._data.any else 0)
        if key not in self._units:
            numbers = self._data.numbers(self.plan, self._cp_rank, microbatch)
            self._units[key] = stage_unit_operators(
                self.plan,
                self._stages[stage],
                next(iter(numbers.values())),
                (self.rank, microbatch, self._data.load),
                numbers,
            )
        return self._units[key]

    def kept(self, action: Action) -> tuple[SavedTensor, ...]:
        """Return what an action leaves of its microbatch until the next one that uses it."""
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return tuple(one for unit in units for one in unit.saved)
        if action.kind is ActionKind.B:
            return tuple(one for unit in units for one in unit.kept_for_weight_gradient)
        return ()

    def actions(self) -> Iterator[ActionBytes]:
        """Yield what is kept after each action, and at most while it runs."""
        for one in self.walk(self.row):
            running = elementwise_max(one.own, self._running(one.action))
            yield ActionBytes(action=one.action, kept=one.kept, peak=one.others + running)

    def walk(self, row: Sequence[Action]) -> Iterator[ActionMoments]:
        """Yield what there is of activations while each action of `row` runs."""
        living: dict[StageMicrobatch, Num] = {}
        entered: set[StageMicrobatch] = set()
        losses: Num = 0
        total: Num = 0
        for action in row:
            key = (action.stage, action.microbatch)
            own = living.pop(key, 0)
            total = total - own
            others = losses + total - self._handed_on(living, entered | {key})
            entered.discard(key)
            if action.kind in (ActionKind.F, ActionKind.B):
                living[key] = left = self._left_by(action)
                total = total + left
            if action.kind is ActionKind.F:
                entered.add(key)
                losses = losses + self._numbers.statistics_bytes * self._stages[action.stage].last
            kept = losses + total - self._handed_on(living, entered)
            yield ActionMoments(
                action=action, others=others, own=own, moments=self.moments(action), kept=kept
            )

    def _left_by(self, action: Action) -> Num:
        """Return the bytes of what an action leaves of its microbatch."""
        key = (action.kind, action.stage, action.microbatch if self._data.any else 0)
        if key not in self._left:
            self._left[key] = total_saved_bytes(self.kept(action))
        return self._left[key]

    def _handed_on(
        self, living: Mapping[StageMicrobatch, Num], entered: set[StageMicrobatch]
    ) -> Num:
        """Return what counts twice: an empty stage hands its input on to the next one here."""
        found: Num = 0
        for stage in self._empty:
            for (other, microbatch), size in living.items():
                if other == stage and (stage + 1, microbatch) in entered:
                    found = found + size
        return found

    def moments(self, action: Action) -> Sequence[Moment]:
        """Return what an action has of its own microbatch, operator by operator."""
        key = (action.kind, action.stage, action.microbatch if self._data.any else 0)
        if key not in self._moments:
            self._moments[key] = tuple(self._found(action))
        return self._moments[key]

    def _found(self, action: Action) -> Iterator[Moment]:
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return forward_moments(units, self._numbers)
        if action.kind is ActionKind.W:
            return weight_gradient_moments(units)
        return backward_moments(units, self._numbers, split=action.kind is ActionKind.B)

    def _running(self, action: Action) -> Num:
        """Return the most that an action has of its own microbatch, what it keeps included."""
        return elementwise_max(0, *(one.bytes for one in self.moments(action)))


_OF_THE_GRAPH = ("statistics", "statistics of heads", "log-sum-exp")
"""What nothing but backward asks for: it goes at once where there is none."""

_PutOff: TypeAlias = "tuple[Num, Num]"
"""What weight gradients that were put off keep, and what they have beside that while they run."""

_NOTHING: _PutOff = (0, 0)

_Found: TypeAlias = "tuple[str, Num]"
"""An operator, and the most that is there while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Say what there is of a microbatch while an operator of a unit runs.

    `backward` is whether it is the backward pass of the operator; forward passes come again in a
    backward pass. No operator: the unit has begun, or all of it is over.
    """

    unit: str
    operator: str
    bytes: Num
    backward: bool = False


def forward_moments(units: Sequence[UnitOperators], x: ActivationNumbers) -> Iterator[Moment]:
    """Yield what is there while each operator runs forward."""
    kept: Num = 0
    for unit in units:
        if unit.stored is None:
            found, _ = _forward(unit.operators, _NOTHING)
            yield from _moments(unit, found, kept)
        elif unit.operators:
            yield from _moments(unit, _without_graph(unit.operators, x), kept + x.stream)
        kept = kept + total_saved_bytes(unit.saved)
        yield Moment(unit=unit.name, operator="", bytes=kept)


def _moments(
    unit: UnitOperators, found: Iterable[_Found], beside: Num, *, backward: bool = False
) -> Iterator[Moment]:
    for name, size in found:
        yield Moment(unit=unit.name, operator=name, bytes=beside + size, backward=backward)


def backward_moments(
    units: Sequence[UnitOperators], x: ActivationNumbers, *, split: bool
) -> Iterator[Moment]:
    """Yield what is there while each operator runs backward; `split`: weight gradients wait for W.

    The gradient that came from the next stage lives as long as the pass.
    """
    kept = sum((total_saved_bytes(unit.saved) for unit in units), 0)
    waiting: Num = 0
    carried = _NOTHING
    came: Num = 0
    first = True
    at_end = units[-1].name == UNIT_HEAD
    given = 0 * x.stream if at_end else _output_gradient(units[-1], x, split=split)
    hosts = [place for place, unit in enumerate(units) if unit.on_host]
    for place, unit in reversed(list(enumerate(units))):
        kept = kept - total_saved_bytes(unit.saved)
        # What a block stored on the host comes back while a later one runs.
        ahead = bool(hosts) and hosts[0] < place <= hosts[-1]
        base = kept + waiting + came + ahead * x.stream
        again, apart = unit.stored is not None, _output_gradient(unit, x, split=split)
        if not unit.operators:
            # What came goes on, in memory of its own.
            passed = kept + total_saved_bytes(unit.saved) + 2 * x.stream
            yield Moment(unit=unit.name, operator="", bytes=passed, backward=True)
        own = apart * again if again else 0 * x.stream
        forward, found = _forward(unit.operators, carried if again else _NOTHING)
        beside = elementwise_max(own, given * first)
        back, later = _backward(unit.operators, found if again else carried, beside, split=split)
        if not again:
            # Objects of the graph live as long as it does.
            came = came + sum(one.saved_bytes for one in unit.operators if one.name == DISPATCH)
            yield from _moments(unit, back, base, backward=True)
        elif unit.operators:
            # The input of the block is there already; its output and what it was given stay.
            base = base - unit.operators[0].saved[0].bytes + x.stream
            yield from _moments(unit, forward, base + apart)
            yield from _moments(unit, back, base + x.stream, backward=True)
        waiting = waiting + split * total_saved_bytes(unit.kept_for_weight_gradient)
        carried = later
        if unit.name != UNIT_HEAD:
            came = came + (given if first else 0)
            first = False
    yield Moment(unit="", operator="", bytes=waiting + carried[0] + carried[1], backward=True)


def weight_gradient_moments(units: Sequence[UnitOperators]) -> Iterator[Moment]:
    """Yield what waits for W while the weight gradients of each operator run."""
    kept = sum((total_saved_bytes(unit.kept_for_weight_gradient) for unit in units), 0)
    for unit in reversed(units):
        for operator in reversed(unit.operators):
            yield Moment(unit=unit.name, operator=operator.name, bytes=kept, backward=True)
            kept = kept - operator.weight_gradient_bytes


def _output_gradient(unit: UnitOperators, x: ActivationNumbers, *, split: bool) -> Num:
    """Return the gradient of the output of a unit; where W needs it, it waits anyway."""
    # Beside an MLP the output layer of attention is given the same.
    names = (DOWN, SHARED, "o") if holds(x.parallel) else (DOWN, SHARED)
    waits = [
        one
        for one in unit.operators
        if one.name in names and total_saved_bytes(one.kept_for_weight_gradient)
    ]
    return x.stream * (elementwise_max(x.scattered, x.apart) if split and waits else 1)


def _forward(operators: Sequence[OperatorMemory], carried: _PutOff) -> tuple[list[_Found], _PutOff]:
    """Return the most of each operator, and what of weight gradients that were put off is left."""
    found: list[_Found] = []
    kept: Num = 0
    for operator in operators:
        if operator.rerun is not None:
            found.append((operator.name, kept + operator.rerun + carried[0] + carried[1]))
            carried = _NOTHING
        found.append((operator.name, kept + operator.forward + carried[0]))
        kept = kept + operator.saved_bytes
    return found, carried


def _without_graph(operators: Sequence[OperatorMemory], x: ActivationNumbers) -> Iterator[_Found]:
    """Yield the most that a block has, its input left out, where it keeps nothing for backward.

    Variables live as long as the function that they are of.
    """
    kept: Num = -x.stream
    before: tuple[SavedTensor, ...] = ()
    routed: Num = 0
    for operator in operators:
        if operator.name == ATTENTION_DROPOUT:
            kept = 0 * x.stream
        elif operator.name == MLP_DROPOUT:
            kept = x.stream
        elif operator.early is not None and operator.name != "o":
            kept = kept - sum(one.bytes for one in before if one.name == "gate and up")
        elif operator.name == EXPERTS:
            # Of the router its input alone is left, of shared experts their output.
            kept = kept - routed
        bare = operator.forward_without_graph
        bare = operator.forward if bare is None else bare
        yield operator.name, kept + bare
        left = sum(one.bytes for one in operator.saved if one.name not in _OF_THE_GRAPH)
        kept, routed = kept + left, routed + left * (operator.name in (ROUTER, SHARED))
        if operator.name == ROUTER:
            routed = routed - x.stream
        before = operator.saved


def _backward(
    operators: Sequence[OperatorMemory], carried: _PutOff, given: Num, *, split: bool
) -> tuple[list[_Found], _PutOff]:
    """Return the most of each operator, and the weight gradients that are put off after it.

    `given` is the gradient of the output, which lives on beside that of the stream.
    """
    found: list[_Found] = []
    kept = sum((operator.saved_bytes for operator in operators), 0)
    waiting: Num = 0
    beside: Num = 0
    for operator in reversed(operators):
        if operator.name == ATTENTION_DROPOUT:
            beside = given
        there = elementwise_max(0, beside - operator.output_gradient)
        base = kept + waiting + there + carried[0]
        peak = base + operator.again
        made = (one.remade_bytes for one in operators if one.reader == operator.name)
        kept = kept + sum(made, 0)
        base = kept + waiting + there
        if split:
            peak = elementwise_max(peak, base + operator.backward_split)
            waiting = waiting + operator.weight_gradient_bytes
        elif operator.early is None:
            peak = elementwise_max(peak, base + operator.backward + carried[0])
        else:
            run = operator.early + carried[0] + carried[1]
            peak = elementwise_max(peak, base + run, base + operator.backward)
            carried = _NOTHING
        found.append((operator.name, peak))
        if not split:
            carried = carried[0] + operator.deferred, carried[1] + operator.deferred_peak
        kept = kept - operator.saved_bytes * (operator.name != DISPATCH) - operator.remade_bytes
    return found, carried
