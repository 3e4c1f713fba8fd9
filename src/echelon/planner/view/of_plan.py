"""Rows for memory bars from one plan: what each pipeline rank holds at its peak, by exact formulas.

Model state is that of `cost/bytes_held.py`, activations the peak of `cost/activations.py` over the
schedule, and what a step holds beside them at most that of `cost/transient.py`. So the sum is a
bound: the parts need not be at their most at the same time. A CPU's device is the memory of its
host: there what rests on the host counts too. What a process or an allocator holds back does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations import RankActivations
from echelon.cost.bytes_held import bytes_held
from echelon.cost.stage import rank_part
from echelon.cost.terms import HeldTerm
from echelon.cost.transient import held_at_most

_STATE = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master parameters": "optimizer",
    "optimizer state": "optimizer",
}
_STEP = {"whole units of parameters": "gathered"}
_ACTIVATIONS = frozenset({"attention over context ranks", "rows on their way to experts"})
"""What the peak of activations has in it."""


def rows_of(plan: Plan) -> list[tuple[str, dict[str, float]]]:
    """Return (label, bytes by term) of each pipeline rank; those alike that follow are one row."""
    runs: list[tuple[int, int, dict[str, float]]] = []
    for pp in range(plan.mesh.pp):
        terms = _terms(plan, pp)
        if runs and runs[-1][2] == terms:
            runs[-1] = (runs[-1][0], pp, terms)
        else:
            runs.append((pp, pp, terms))
    places = range(plan.mesh.pp)
    word = "stage" if all(_stages(plan, pp) == [pp] for pp in places) else "pp rank"
    return [
        (f"{word} {first}" if first == last else f"{word}s {first}-{last}", terms)
        for first, last, terms in runs
    ]


def _terms(plan: Plan, pp: int) -> dict[str, float]:
    """Return the bytes of the first rank at a place of the pipeline, by term."""
    rank = plan.mesh.rank({Axis.PP: pp})
    found = dict.fromkeys((*_STATE.values(), "gathered", "activations", "buffers"), 0.0)
    for term in _on_device(plan, bytes_held(plan, rank)):
        found[_STATE[term.name]] += term.bytes
    for term in _on_device(plan, held_at_most(plan, pp)):
        if term.name not in _ACTIVATIONS:
            found[_STEP.get(term.name, "buffers")] += term.bytes
    peaks = (np.max(action.peak) for action in RankActivations(plan, rank).actions())
    found["activations"] = float(max(peaks, default=0.0))
    return found


def _on_device(plan: Plan, terms: tuple[HeldTerm, ...]) -> Iterator[HeldTerm]:
    pools = {"device", "host"} if plan.cluster.backend == "gloo" else {"device"}
    return (term for term in terms if term.pool in pools)


def _stages(plan: Plan, pp: int) -> list[int]:
    return [part.stage for part in rank_part(plan, pp).stages]
