"""Rows for memory bars from one plan: what each pipeline rank holds at its peak, by exact formulas.

Model state is that of `cost/bytes_held.py`, activations the peak of `cost/activations.py` over the
schedule, and what a step holds beside them at most that of `cost/transient.py`. So the sum is a
bound: the parts need not be at their most at the same time. A CPU's device is the memory of its
host: there what rests on the host counts too. What a process or an allocator holds back does not.
"""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.cost.stage import rank_part
from echelon.planner.held import held_by_place

ORDER = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers")
"""The terms as bars show them."""


def rows_of(plan: Plan) -> list[tuple[str, dict[str, float]]]:
    """Return (label, bytes by term) of each pipeline rank; those alike that follow are one row."""
    runs: list[tuple[int, int, dict[str, float]]] = []
    for pp, held in enumerate(held_by_place(plan)):
        terms = {name: held[name] for name in ORDER}
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


def _stages(plan: Plan, pp: int) -> list[int]:
    return [part.stage for part in rank_part(plan, pp).stages]
