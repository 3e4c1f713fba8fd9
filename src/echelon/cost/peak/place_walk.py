# SPDX-License-Identifier: Apache-2.0
"""The walk over the actions of a rank: the highest of its moments, beside what always rests there.

An action leaves the sums and the whole units of a rank in some state, and in the state that one
like it began with it has the same highest moment and leaves the same. So each action of a kind, on
a stage, in a state is walked once; the many of a step, and those of other places of the pipeline
whose stages are alike, are looked up. What they differ in is what other microbatches keep, and
messages: these are the same at every moment of an action.

Backward writes gradients of weights in an order (`WeightOrder`): by operator, with what is put off.
Over tensor ranks the product of a row-parallel layer waits for the collective of the column layer
before it; under sequence parallelism that of a column layer waits for the next gather. Where
attention or experts send something, products run while that is under way
(`parallel/storage/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, is_adapter
from echelon.core.plan import Plan
from echelon.cost.activations.attention import ATTENTION
from echelon.cost.activations.expert_numbers import has_grouped_products
from echelon.cost.activations.experts import DISPATCH, EXPERTS, ROUTER, SHARED
from echelon.cost.activations.linear import DOWN
from echelon.cost.activations.numbers import ActivationNumbers
from echelon.cost.activations.timeline import ActionMoments, Moment, RankActivations
from echelon.cost.activations.units import UnitOperators
from echelon.cost.peak.buckets import GradientSums, SumsState, WholeState, WholeUnits
from echelon.cost.peak.update import most_update_bytes
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD, plan_buckets, unit_of
from echelon.layout.slots import trained_buckets
from echelon.layout.stage import RankPart, held_experts, part_of, stage_parameters
from echelon.schedule.action import Action, ActionKind

OperatorKey = tuple[str, str]
"""A unit and an operator of it; ("", "") is the end of the pass."""

END: OperatorKey = ("", "")

_OF_PARTS: Mapping[str, str] = {
    "attention_norm": "attention norm",
    "mlp_norm": "mlp norm",
    "attention_post_norm": "attention post norm",
    "mlp_post_norm": "mlp post norm",
    "attention.q": "q, k, v",
    "attention.k": "q, k, v",
    "attention.v": "q, k, v",
    "attention.q_norm": "heads",
    "attention.k_norm": "heads",
    "attention.sinks": "attention",
    "attention.o": "o",
    "attention.q_down": "q_down, kv_down",
    "attention.kv_down": "q_down, kv_down",
    "attention.q_up": "q_up",
    "attention.kv_up": "kv_up",
    "mlp.gate": "gate, up",
    "mlp.up": "gate, up",
    "mlp.down": DOWN,
}
"""The operator of a part of a block, but for experts."""

_COLUMNS = frozenset({"q, k, v", "gate, up", "q_up", "kv_up"})
_ROWS = frozenset({"o", DOWN})
_ALIKE = frozenset({"q_down, kv_down"})
"""Layers that every tensor rank has whole."""


def operator_of(plan: Plan, spec: ParameterSpec) -> str:
    """Return the operator whose backward writes the gradient of a parameter."""
    if spec.layer is None:
        ends = {EMBEDDING: UNIT_EMBEDDING, HEAD: "loss", "positions.weight": "positions"}
        return ends.get(spec.name, "last norm")
    if spec.expert is not None:
        return EXPERTS
    part = spec.name.split(".", 2)[2].rsplit(".", 1)[0]
    if is_adapter(spec.name):
        part = part.rpartition(".")[0]
    if part.startswith("mlp.shared."):
        return SHARED
    if part in ("mlp.router", "mlp.logit_bias"):
        return ROUTER
    if plan.model.latent is not None and part in ("attention.q_norm", "attention.kv_norm"):
        return part.removeprefix("attention.")
    return _OF_PARTS[part]


def writes_at_end(operator: str, *, fused_norm: bool) -> bool:
    """Return whether an operator writes its gradient when what it works with is gone: a norm.

    One that is a kernel has its partial sums until their sum is written.
    """
    return operator.endswith("norm") and not fused_norm


class WeightOrder:
    """Say which gradients backward of a stage writes at each of its operators."""

    def __init__(
        self, plan: Plan, units: Sequence[UnitOperators], specs: Sequence[ParameterSpec]
    ) -> None:
        """Take the units of a stage and the parameters that it uses."""
        self._tensor = plan.mesh.tp > 1
        self._scattered = self._tensor and plan.layout.sequence_parallel
        self._sent = plan.mesh.cp > 1
        grouped = plan.model.experts is not None and has_grouped_products(plan)
        self._experts_put_off = self._tensor or plan.mesh.ep > 1 or grouped
        experts = plan.model.experts
        self._shared = experts is not None and experts.shared_experts > 0
        self._chunks = plan.layout.experts.chunks
        self._units, self._of_operators = units, _by_operator(plan, units, specs)

    @cached_property
    def whole(self) -> dict[OperatorKey, list[str]]:
        """Return what each operator of a whole backward pass writes."""
        return _listed(self._walk(self._units, self._of_operators, split=False))

    @cached_property
    def by_operator(self) -> dict[OperatorKey, list[str]]:
        """Return what W writes of each operator."""
        return _listed(self._walk(self._units, self._of_operators, split=True))

    def _walk(
        self,
        units: Sequence[UnitOperators],
        by_operator: Mapping[OperatorKey, Sequence[str]],
        *,
        split: bool,
    ) -> Iterator[tuple[OperatorKey, str]]:
        """Yield each gradient with the operator at which it is written."""
        queue: list[str] = []
        for unit in reversed(units):
            for operator in reversed(unit.operators):
                key = (unit.name, operator.name)
                own = [*by_operator.get(key, ())]
                if operator.name == EXPERTS:
                    own = own * self._chunks
                if split:
                    yield from ((key, name) for name in own)
                    continue
                if self._runs_before(operator.name):
                    yield from ((key, name) for name in queue)
                    queue = []
                if self._puts_off(operator.name):
                    queue += own
                    own = []
                if self._runs_after(operator.name):
                    yield from ((key, name) for name in queue)
                    queue = []
                yield from ((key, name) for name in own)
        yield from ((END, name) for name in queue)

    def _runs_before(self, operator: str) -> bool:
        """Return whether an operator begins with what was put off."""
        if operator in _ROWS or operator in _COLUMNS:
            return self._scattered
        sends = operator == ATTENTION and self._sent
        shared = operator == SHARED and self._shared
        return sends or shared or operator in (DISPATCH, "loss")

    def _puts_off(self, operator: str) -> bool:
        if operator in _ROWS:
            return self._tensor or (operator == "o" and self._sent)
        if operator in _COLUMNS:
            return self._scattered
        if operator == EXPERTS:
            return self._experts_put_off
        return operator in (*_ALIKE, SHARED) and self._tensor

    def _runs_after(self, operator: str) -> bool:
        """Return whether an operator ends with what was put off, its own or that of others."""
        return operator in _COLUMNS and not self._scattered


def _listed(found: Iterator[tuple[OperatorKey, str]]) -> dict[OperatorKey, list[str]]:
    listed: dict[OperatorKey, list[str]] = {}
    for key, name in found:
        listed.setdefault(key, []).append(name)
    return listed


def _by_operator(
    plan: Plan, units: Sequence[UnitOperators], specs: Sequence[ParameterSpec]
) -> dict[OperatorKey, list[str]]:
    found: dict[OperatorKey, list[str]] = {}
    here = {unit.name for unit in units}
    for spec in specs:
        if spec.frozen:
            continue
        if spec.name == EMBEDDING:
            if UNIT_EMBEDDING in here:
                found.setdefault((UNIT_EMBEDDING, UNIT_EMBEDDING), []).append(spec.name)
            if plan.model.tied and UNIT_HEAD in here:
                found.setdefault((UNIT_HEAD, "loss"), []).append(spec.name)
            continue
        unit = unit_of(spec.name) if spec.layer is None else f"layers.{spec.layer}"
        key = (unit, operator_of(plan, spec))
        found.setdefault(key, []).append(spec.name)
    return found


_WRITES = (ActionKind.W, ActionKind.BW)


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestMoment:
    """Hold the highest moment of a step: what is there by term, but for what always rests there."""

    terms: Mapping[str, float]
    where: str
    """The moment: an action, a unit of its stage and an operator, or the update."""
    reads: int
    """The most slices of parameters that are on their way, or there, at a time."""


@dataclass(frozen=True, slots=True)
class _Highest:
    """Say what a moment has, but for other microbatches and messages, in bytes."""

    activations: float
    buffers: float
    gathered: float
    unit: str = ""
    operator: str = ""

    @property
    def total(self) -> float:
        return self.activations + self.buffers + self.gathered


@dataclass(frozen=True, slots=True)
class _Beside:
    """Say what there is beside an action, in bytes."""

    action: str
    activations: float
    messages: float


@dataclass(frozen=True, slots=True)
class _Passed:
    """Say what an action has at most, and the state that it leaves, by its number."""

    highest: _Highest
    state: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Say how many gradients of one bucket are written one after the other."""

    name: str
    count: int


_Order = Mapping[OperatorKey, Sequence[_Written]]
_State = tuple[SumsState, WholeState]


class PlaceWalk:
    """The walk of one rank, and of those that are alike."""

    def __init__(
        self, plan: Plan, rank: int, numbers: ActivationNumbers, resting: Mapping[str, float]
    ) -> None:
        """Begin with a step that has done nothing; `resting` is kept for who asks."""
        self._plan, self._rank, self.resting = plan, rank, resting
        self._part = part_of(plan, rank)
        self.buckets = plan_buckets(plan, self._part)
        self._activations = RankActivations(plan, rank, numbers=numbers)
        self._sums = GradientSums(plan, self._part, self.buckets)
        self._whole = WholeUnits(plan, self._part, self.buckets)
        self._stream = float(numbers.stream)
        self._fused_norm = bool(numbers.fused_norm)
        self._orders: dict[tuple[int, bool], _Order] = {}
        self._highest_of: dict[tuple[ActionKind, int], Moment] = {}
        self._numbers: dict[_State, int] = {}
        self._states: list[_State] = []
        self._start = self._state()
        self._known: dict[tuple[object, ...], _Passed] = {}
        self._seen: _Highest | None = None
        served = plan.mesh.servers > 0
        self._update = 0 if served else most_update_bytes(plan, rank, trained_buckets(self.buckets))

    def highest(
        self, row: Sequence[Action], counts: Sequence[int], part: RankPart, outer_bytes: int = 0
    ) -> HighestMoment:
        """Return the highest moment of the actions of `row`, beside so many messages of each.

        `part` is what the rank of `row` holds. After the update outer steps of local SGD may have
        `outer_bytes`.
        """
        here = zip(part.stages, self._part.stages, strict=True)
        stages = {other.stage: own.stage for other, own in here}
        own_row = [replace(action, stage=stages[action.stage]) for action in row]
        last = {
            action.stage: place for place, action in enumerate(own_row) if action.kind in _WRITES
        }
        step = _Step()
        state = self._start
        for place, one in enumerate(self._activations.walk(own_row)):
            ends = last.get(one.action.stage) == place
            passed = self._passed(one, state, ends=ends)
            messages = counts[place] * self._stream
            step.see(_Beside(str(row[place]), float(one.others), messages), passed.highest)
            state = passed.state
        self._restore(state)
        self._sums.finish()
        step.see(_Beside("the end of backward", 0.0, 0.0), self._resting_moment())
        self._whole.end_pass()
        step.see(_Beside("update", 0.0, 0.0), self._resting_moment(self._update))
        step.see(_Beside("outer steps", 0.0, 0.0), self._resting_moment(outer_bytes))
        names = zip(self._part.blocks, part.blocks, strict=True)
        units = {f"layers.{own}": f"layers.{other}" for own, other in names}
        return HighestMoment(
            terms=step.terms, where=step.where(units), reads=self._whole.most_reads
        )

    def _passed(self, one: ActionMoments, state: int, *, ends: bool) -> _Passed:
        """Return what an action has and leaves, which begins in a state; `ends`: the last one."""
        action, own = one.action, float(one.own)
        key = (action.kind, action.stage, own, ends, state)
        if key not in self._known:
            self._restore(state)
            self._seen = None
            self._walk(action, own, one.moments, ends=ends)
            assert self._seen is not None
            self._known[key] = _Passed(self._seen, self._state())
        return self._known[key]

    def _walk(self, action: Action, own: float, moments: Sequence[Moment], *, ends: bool) -> None:
        self._see("", "", own)
        if action.kind in _WRITES:
            self._sums.start_backward(action.stage, last=ends)
        if not (self._whole.any or self._sums.takes_part):
            self._see_highest(action, moments)
        elif action.kind is ActionKind.F:
            self._forward(moments)
        else:
            self._backward(action, moments)

    def _state(self) -> int:
        """Return the number of the state that sums and whole units are in."""
        state = self._sums.state(), self._whole.state()
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
        return self._numbers[state]

    def _restore(self, number: int) -> None:
        sums, whole = self._states[number]
        self._sums.restore(sums)
        self._whole.restore(whole)

    def _resting_moment(self, buffers: float = 0.0) -> _Highest:
        """Return what is there where no action runs."""
        return _Highest(0.0, buffers + self._sums.most(), float(self._whole.bytes))

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
        writes = action.kind in _WRITES
        gathers = action.kind is not ActionKind.W
        written = self._order(action.stage, by_operator=action.kind is ActionKind.W)
        unit = ""
        for one, after in zip(moments, (*moments[1:], None), strict=True):
            if one.unit != unit and gathers:
                self._whole.leave_backward(unit)
                self._whole.enter_backward(one.unit)
            unit = one.unit
            at_end = writes_at_end(one.operator, fused_norm=self._fused_norm)
            if at_end:
                self._see(unit, one.operator, float(one.bytes))
            if writes and one.backward:
                for gradients in written.get((unit, one.operator), ()):
                    self._sums.write(gradients.name, gradients.count)
            if not at_end:
                self._see(unit, one.operator, float(one.bytes))
            elif after is not None:
                # A bucket that is full begins its sum while its unit is still whole.
                self._see(unit, one.operator, float(min(one.bytes, after.bytes)))
        if gathers:
            self._whole.leave_backward(unit)

    def _order(self, stage: int, *, by_operator: bool) -> _Order:
        """Return what a backward pass, or W, writes at each operator, bucket by bucket."""
        if (stage, by_operator) not in self._orders:
            (part,) = (one for one in self._part.stages if one.stage == stage)
            specs = stage_parameters(self._plan, part, held_experts(self._plan, self._part))
            order = WeightOrder(self._plan, self._activations.units(stage, 0), specs)
            bucket = {name: one.name for one in self.buckets for name in one.names}
            found = order.by_operator if by_operator else order.whole
            self._orders[stage, by_operator] = {
                key: _by_bucket(names, bucket) for key, names in found.items()
            }
        return self._orders[stage, by_operator]

    def _see(self, unit: str, operator: str, activations: float) -> None:
        """Look at a moment of an action: what an operator has of its microbatch, sums, units."""
        sums = self._sums.most()
        whole = float(self._whole.bytes)
        seen = self._seen
        if seen is None or activations + float(sums) + whole > seen.total:
            self._seen = _Highest(activations, float(sums), whole, unit, operator)


class _Step:
    """The highest of the moments of a step that were seen so far."""

    def __init__(self) -> None:
        self._best = -1.0
        self._words = ("", "", "")
        self.terms: dict[str, float] = {}

    def see(self, beside: _Beside, one: _Highest) -> None:
        """Look at a moment, with what is beside it."""
        activations = beside.activations + one.activations
        total = activations + beside.messages + one.buffers + one.gathered
        if total > self._best:
            self._best = total
            self._words = (beside.action, one.unit, one.operator)
            self.terms = {
                "activations": activations,
                "messages": beside.messages,
                "buffers": one.buffers,
                "gathered": one.gathered,
            }

    def where(self, units: Mapping[str, str]) -> str:
        """Return the moment in words; `units` are what the blocks of this rank are called."""
        action, unit, operator = self._words
        return ", ".join(word for word in (action, units.get(unit, unit), operator) if word)


def _by_bucket(names: Sequence[str], bucket: Mapping[str, str]) -> list[_Written]:
    """Return gradients in their order, those of one bucket that follow each other together."""
    found: list[_Written] = []
    for _, alike in groupby(names, key=lambda name: bucket[name]):
        some = [*alike]
        found.append(_Written(some[0], len(some)))
    return found
