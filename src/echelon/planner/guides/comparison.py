"""The guides' tables of strategies, with the reader's numbers in place of "low" and "high".

Each row is one way to use all devices: what it cuts and sends, what the fullest rank holds, how
long a step takes, and which axes use links between nodes. Cells that a guide has wrong name the
claim of the errata that mends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.core.plan import Plan
from echelon.cost.lattice.software import Software
from echelon.planner.estimate import estimate_work
from echelon.planner.guides.memory import Split, work_of_split
from echelon.planner.guides.situation import Situation
from echelon.planner.guides.strategy import FREE, SEVERAL, Outcome, Strategy, outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Name a strategy of the tables, what it cuts and sends in a step, and the claims about it."""

    strategy: Strategy
    cuts: str
    sends: str
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold what a kind comes to; no outcome where it cannot use all devices."""

    kind: Kind
    outcome: Outcome | None
    step_s: float | None
    across_nodes: tuple[str, ...]


KINDS = (
    Kind(
        strategy=Strategy(name="data parallel"),
        cuts="the batch",
        sends="all-reduce of gradients, by buckets: 2 psi",
        claims=("003-14", "004-10"),
    ),
    Kind(
        strategy=Strategy(name="ZeRO 1", zero=(1,)),
        cuts="optimizer state",
        sends="reduce-scatter and all-gather: 2 psi",
        claims=("002-38", "003-04"),
    ),
    Kind(
        strategy=Strategy(name="ZeRO 2", zero=(2,)),
        cuts="gradients too",
        sends="reduce-scatter and all-gather: 2 psi",
        claims=("002-35", "003-05"),
    ),
    Kind(
        strategy=Strategy(name="ZeRO 3", zero=(3,)),
        cuts="parameters too",
        sends="two all-gathers and a reduce-scatter: 3 psi",
        claims=("002-41", "003-06", "003-07"),
    ),
    Kind(
        strategy=Strategy(name="tensor", tp=SEVERAL),
        cuts="each matrix",
        sends="two sums a block, forward and again backward",
        claims=("002-03", "002-13", "003-29"),
    ),
    Kind(
        strategy=Strategy(name="pipeline", pp=SEVERAL),
        cuts="blocks",
        sends="activations of a microbatch to the next stage",
        claims=("002-22", "003-74"),
    ),
    Kind(
        strategy=Strategy(name="context", cp=SEVERAL),
        cuts="the sequence",
        sends="keys and values of every block",
        claims=("003-09", "003-58"),
    ),
    Kind(
        strategy=Strategy(name="expert", ep=SEVERAL),
        cuts="routed experts",
        sends="tokens to their experts and back",
        claims=("003-51", "003-65"),
    ),
    Kind(
        strategy=Strategy(name="tensor x pipeline", tp=SEVERAL, pp=SEVERAL, ep=FREE),
        cuts="matrices and blocks",
        sends="as those two do",
        claims=("002-48",),
    ),
    Kind(
        strategy=Strategy(
            name="tensor x pipeline x ZeRO 1", zero=(1,), tp=SEVERAL, pp=SEVERAL, ep=FREE
        ),
        cuts="matrices, blocks and optimizer state",
        sends="as those two, and 2 psi of a rank's part",
        claims=("003-68",),
    ),
)


def compare(situation: Situation, software: Software) -> Iterator[Row]:
    """Yield every strategy with the situation's numbers; seconds are those of a trainer."""
    for kind in KINDS:
        found = outcome(kind.strategy, situation)
        yield Row(
            kind=kind,
            outcome=found,
            step_s=None
            if found is None or not found.fits
            else step_seconds_of(situation.plan, found.split, kind.strategy, software),
            across_nodes=() if found is None else across_nodes(found.split, situation.domain),
        )


def step_seconds_of(plan: Plan, split: Split, strategy: Strategy, software: Software) -> float:
    """Return the seconds of a step of the model and batch of `plan`, split otherwise."""
    work = replace(work_of_split(plan, split, strategy.recompute), software=software)
    return estimate_work(work, plan.mathematics, plan.cluster).step_s


def across_nodes(split: Split, domain: int) -> tuple[str, ...]:
    """Return the axes whose groups lie on several nodes, ranks being ordered as `core/mesh.py` has.

    Tensor ranks are neighbours, then context, data and pipeline ranks: an axis stays inside where
    its groups, with all inside of them, fill an even part of a node (of `domain` devices).
    """
    found: list[str] = []
    span = 1
    for axis, degree in (("tp", split.tp), ("cp", split.cp), ("dp", split.dp), ("pp", split.pp)):
        span *= degree
        if degree > 1 and domain % span:
            found.append(axis)
    return tuple(found)
