"""The most that a stage holds of one microbatch while it runs forward or backward.

Operators run one after the other. Forward, what they keep adds up; backward, it goes again, and in
B what waits for W comes in its place. A recomputed block keeps its input alone; before its backward
it runs forward again, and beside its gradients its output and what it was given live on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from echelon.cost.activations.experts import DISPATCH, EXPERTS, ROUTER, SHARED
from echelon.cost.activations.linear import ATTENTION_DROPOUT, DOWN, MLP_DROPOUT
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    OperatorMemory,
    SavedTensor,
    elementwise_max,
    total_saved_bytes,
)
from echelon.cost.activations.units import UnitOperators
from echelon.layout.buckets import UNIT_HEAD

_OF_THE_GRAPH = ("statistics", "statistics of heads", "log-sum-exp")
"""What nothing but backward asks for: it goes at once where there is none."""

_PutOff: TypeAlias = "tuple[Num, Num]"
"""What weight gradients that were put off keep, and what they have beside that while they run."""

_NOTHING: _PutOff = (0, 0)


def forward_peak(units: Sequence[UnitOperators], x: ActivationNumbers) -> Num:
    """Return the most that is there in a forward pass."""
    peak: Num = 0
    kept: Num = 0
    for unit in units:
        if unit.stored is None:
            peak = elementwise_max(peak, kept + _forward(unit.operators, _NOTHING)[0])
        elif unit.operators:
            peak = elementwise_max(peak, kept + x.stream + _without_graph(unit.operators, x))
        kept = kept + total_saved_bytes(unit.saved)
    return elementwise_max(peak, kept)


def backward_peak(units: Sequence[UnitOperators], x: ActivationNumbers, *, split: bool) -> Num:
    """Return the most that is there in a backward pass; `split`: weight gradients wait for W.

    The gradient that came from the next stage lives as long as the pass.
    """
    peak: Num = 0
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
            peak = elementwise_max(peak, kept + total_saved_bytes(unit.saved) + 2 * x.stream)
        own = apart * again if again else 0 * x.stream
        forward, found = _forward(unit.operators, carried if again else _NOTHING)
        beside = elementwise_max(own, given * first)
        back, later = _backward(unit.operators, found if again else carried, beside, split=split)
        if not again:
            # Objects of the graph live as long as it does.
            came = came + sum(one.saved_bytes for one in unit.operators if one.name == DISPATCH)
            peak = elementwise_max(peak, base + back)
        elif unit.operators:
            # The input of the block is there already; its output and what it was given stay.
            base = base - unit.operators[0].saved[0].bytes + x.stream
            peak = elementwise_max(peak, base + apart + forward, base + x.stream + back)
        waiting = waiting + split * total_saved_bytes(unit.kept_for_weight_gradient)
        carried = later
        if unit.name != UNIT_HEAD:
            came = came + (given if first else 0)
            first = False
    return elementwise_max(peak, waiting + carried[0] + carried[1])


def _output_gradient(unit: UnitOperators, x: ActivationNumbers, *, split: bool) -> Num:
    """Return the gradient of the output of a unit; where W needs it, it waits anyway."""
    waits = [
        one
        for one in unit.operators
        if one.name == DOWN
        or (one.name == SHARED and total_saved_bytes(one.kept_for_weight_gradient))
    ]
    return x.stream * (elementwise_max(x.scattered, x.dropout) if split and waits else 1)


def _forward(operators: Sequence[OperatorMemory], carried: _PutOff) -> tuple[Num, _PutOff]:
    """Return the most that is there, and what of weight gradients that were put off is left."""
    peak: Num = 0
    kept: Num = 0
    for operator in operators:
        if operator.rerun is not None:
            peak = elementwise_max(peak, kept + operator.rerun + carried[0] + carried[1])
            carried = _NOTHING
        peak = elementwise_max(peak, kept + operator.forward + carried[0])
        kept = kept + operator.saved_bytes
    return peak, carried


def _without_graph(operators: Sequence[OperatorMemory], x: ActivationNumbers) -> Num:
    """Return the most that a block has, its input left out, where it keeps nothing for backward.

    Variables live as long as the function that they are of.
    """
    peak: Num = 0
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
        peak = elementwise_max(peak, kept + bare)
        left = sum(one.bytes for one in operator.saved if one.name not in _OF_THE_GRAPH)
        kept, routed = kept + left, routed + left * (operator.name in (ROUTER, SHARED))
        if operator.name == ROUTER:
            routed = routed - x.stream
        before = operator.saved
    return peak


def _backward(
    operators: Sequence[OperatorMemory], carried: _PutOff, given: Num, *, split: bool
) -> tuple[Num, _PutOff]:
    """Return the most that is there, and the weight gradients that are put off after it.

    `given` is the gradient of the output, which lives on beside that of the stream.
    """
    peak: Num = 0
    kept = sum((operator.saved_bytes for operator in operators), 0)
    waiting: Num = 0
    beside: Num = 0
    for operator in reversed(operators):
        if operator.name == ATTENTION_DROPOUT:
            beside = given
        base = kept + waiting + beside + carried[0]
        peak = elementwise_max(peak, base + operator.again)
        made = (one.remade_bytes for one in operators if one.reader == operator.name)
        kept = kept + sum(made, 0)
        base = kept + waiting + beside
        if split:
            peak = elementwise_max(peak, base + operator.backward_split)
            waiting = waiting + operator.weight_gradient_bytes
        elif operator.early is None:
            peak = elementwise_max(peak, base + operator.backward + carried[0])
        else:
            run = operator.early + carried[0] + carried[1]
            peak = elementwise_max(peak, base + run, base + operator.backward)
            carried = _NOTHING
        if not split:
            carried = carried[0] + operator.deferred, carried[1] + operator.deferred_peak
        kept = kept - operator.saved_bytes * (operator.name != DISPATCH) - operator.remade_bytes
    return peak, carried
