"""The most that a stage holds of one microbatch while it runs forward or backward.

Operators run one after the other. Forward, what they keep adds up; backward, it goes again, and in
B what waits for W comes in its place. A recomputed block keeps its input alone; before its backward
it runs forward again, and beside its gradients its output and what it was given live on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.cost.activation_numbers import ActivationNumbers, Num, Operator, Saved, most, total
from echelon.cost.activation_units import Unit
from echelon.cost.activations_experts import CARRIER, EXPERTS, ROUTER, SHARED
from echelon.cost.activations_linear import ATTENTION_DROPOUT, DOWN, MLP_DROPOUT
from echelon.cost.buckets import UNIT_HEAD

_OF_THE_GRAPH = ("statistics", "statistics of heads", "log-sum-exp")
"""What nothing but backward asks for: it goes at once where there is none."""


def forward_peak(units: Sequence[Unit], x: ActivationNumbers) -> Num:
    """Return the most that is there in a forward pass."""
    peak: Num = 0
    kept: Num = 0
    for unit in units:
        if unit.stored is None:
            peak = most(peak, kept + _forward(unit.operators, Carried())[0])
        elif unit.operators:
            peak = most(peak, kept + x.stream + _without_graph(unit.operators, x))
        kept = kept + total(unit.saved)
    return most(peak, kept)


def backward_peak(units: Sequence[Unit], x: ActivationNumbers, *, split: bool) -> Num:
    """Return the most that is there in a backward pass; `split`: weight gradients wait for W.

    The gradient that came from the next stage lives as long as the pass.
    """
    peak: Num = 0
    kept = sum((total(unit.saved) for unit in units), 0)
    waiting: Num = 0
    carried = Carried()
    came: Num = 0
    first = True
    given = 0 * x.stream if units[-1].name == UNIT_HEAD else _apart(units[-1], x, split=split)
    hosts = [place for place, unit in enumerate(units) if unit.on_host]
    for place, unit in reversed(list(enumerate(units))):
        kept = kept - total(unit.saved)
        # What a block stored on the host comes back while a later one runs.
        ahead = bool(hosts) and hosts[0] < place <= hosts[-1]
        base = kept + waiting + came + ahead * x.stream
        again, apart = unit.stored is not None, _apart(unit, x, split=split)
        if not unit.operators:
            # What came goes on, in memory of its own.
            peak = most(peak, kept + total(unit.saved) + 2 * x.stream)
        own = apart * again if again else 0 * x.stream
        forward, found = _forward(unit.operators, carried if again else Carried())
        flow = Flow(
            carried=found if again else carried, given=most(own, given * first), split=split
        )
        back, later = _backward(unit.operators, flow)
        if not again:
            # Objects of the graph live as long as it does.
            came = came + sum(one.saved_bytes for one in unit.operators if one.name == CARRIER)
        if not again:
            peak = most(peak, base + back)
        elif unit.operators:
            # The input of the block is there already; its output and what it was given stay.
            base = base - unit.operators[0].saved[0].bytes + x.stream
            peak = most(peak, base + apart + forward, base + x.stream + back)
        waiting = waiting + split * total(unit.waits)
        carried = later
        if unit.name != UNIT_HEAD:
            came = came + (given if first else 0)
            first = False
    return most(peak, waiting + carried.bytes + carried.product)


def _apart(unit: Unit, x: ActivationNumbers, *, split: bool) -> Num:
    """Return the gradient of the output of a unit; where W needs it, it waits anyway."""
    waits = [
        one
        for one in unit.operators
        if one.name == DOWN or (one.name == SHARED and total(one.waits))
    ]
    return x.stream * (most(x.scattered, x.dropout) if split and waits else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Say what weight gradients that were put off keep, and what they have while they run."""

    bytes: Num = 0
    product: Num = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Say what backward through a unit finds: what was put off before it.

    `given` is the gradient of the output, which lives on beside that of the stream.
    """

    carried: Carried
    given: Num
    split: bool


def _forward(operators: Sequence[Operator], carried: Carried) -> tuple[Num, Carried]:
    """Return the most that is there, and what of weight gradients that were put off is left."""
    peak: Num = 0
    kept: Num = 0
    for operator in operators:
        if operator.runs is not None:
            peak = most(peak, kept + operator.runs + carried.bytes + carried.product)
            carried = Carried()
        peak = most(peak, kept + operator.forward + carried.bytes)
        kept = kept + operator.saved_bytes
    return peak, carried


def _without_graph(operators: Sequence[Operator], x: ActivationNumbers) -> Num:
    """Return the most that a block has, its input left out, where it keeps nothing for backward.

    Variables live as long as the function that they are of.
    """
    peak: Num = 0
    kept: Num = -x.stream
    before: tuple[Saved, ...] = ()
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
        bare = operator.forward if operator.bare is None else operator.bare
        peak = most(peak, kept + bare)
        left = sum(one.bytes for one in operator.saved if one.name not in _OF_THE_GRAPH)
        kept, routed = kept + left, routed + left * (operator.name in (ROUTER, SHARED))
        if operator.name == ROUTER:
            routed = routed - x.stream
        before = operator.saved
    return peak


def _backward(operators: Sequence[Operator], flow: Flow) -> tuple[Num, Carried]:
    """Return the most that is there, and the weight gradients that are put off after it."""
    peak: Num = 0
    kept = sum((operator.saved_bytes for operator in operators), 0)
    waiting: Num = 0
    beside: Num = 0
    carried = flow.carried
    for operator in reversed(operators):
        if operator.name == ATTENTION_DROPOUT:
            beside = flow.given
        base = kept + waiting + beside
        if flow.split:
            peak = most(peak, base + operator.split)
            waiting = waiting + operator.waiting_bytes
        elif operator.early is None:
            peak = most(peak, base + operator.backward + carried.bytes)
        else:
            run = operator.early + carried.bytes + carried.product
            peak = most(peak, base + run, base + operator.backward)
            carried = Carried()
        if not flow.split:
            carried = Carried(
                bytes=carried.bytes + operator.later, product=carried.product + operator.product
            )
        kept = kept - operator.saved_bytes * (operator.name != CARRIER)
    return peak, carried
