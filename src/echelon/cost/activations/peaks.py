# SPDX-License-Identifier: Apache-2.0
"""What a stage holds of one microbatch while it runs forward or backward: operator by operator.

Operators run one after the other. Forward, what they keep adds up; backward, it goes again, and in
B what waits for W comes in its place. A recomputed block keeps its input alone; before its backward
it runs forward again, and beside its gradients its output and what it was given live on.

Each operator is a `Moment`: the most that is there while it runs. What else a rank holds then,
`cost/peak/` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from echelon.cost.activations.experts import DISPATCH, EXPERTS, ROUTER, SHARED
from echelon.cost.activations.linear import ATTENTION_DROPOUT, DOWN, MLP_DROPOUT
from echelon.cost.activations.numbers import ActivationNumbers, Num, elementwise_max, holds
from echelon.cost.activations.operator_memory import OperatorMemory, SavedTensor, total_saved_bytes
from echelon.cost.activations.units import UnitOperators
from echelon.layout.buckets import UNIT_HEAD

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


def forward_peak(units: Sequence[UnitOperators], x: ActivationNumbers) -> Num:
    """Return the most that is there in a forward pass."""
    return _most(forward_moments(units, x))


def backward_peak(units: Sequence[UnitOperators], x: ActivationNumbers, *, split: bool) -> Num:
    """Return the most that is there in a backward pass; `split`: weight gradients wait for W."""
    return _most(backward_moments(units, x, split=split))


def _most(moments: Iterable[Moment]) -> Num:
    peak: Num = 0
    for one in moments:
        peak = elementwise_max(peak, one.bytes)
    return peak


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
