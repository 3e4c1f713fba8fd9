# SPDX-License-Identifier: Apache-2.0
"""Sizes, best practices and pitfalls of the guides, and all of their advice for a situation.

Where nothing in a plan can show whether a practice was followed, `instead` says what to do.

The reasons are the table of llm-training, section 8, as questions of a situation: each cell is one
to raise tp, pp or dp; what it leaves vague ("high", "many") is a number here. They do not decide,
they are shown beside the trees.

The size guide (llm-training, section 10) has a row for ranges of parameters and devices. Corners of
these ranges do not all fit (llm-training-66 to -68), so a row is always shown with the split that
it comes to on the reader's cluster, and what that holds.

Of the named layouts devices and degrees are the guides'; what each rank holds is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from echelon.core.mesh import Mesh
from echelon.core.plan import Plan, ZeroStage
from echelon.core.units import GB
from echelon.cost.bytes.model_sizes import MIXED_PRECISION, model_states
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.handbook.guides.situation import (
    BLOCK_FITS,
    DEEP,
    FAST_INSIDE,
    FITS_ONE,
    MANY_NODES,
    GuideAnswer,
    GuideQuestion,
    PlanSituation,
    Situation,
)
from echelon.handbook.guides.strategy import (
    DegreeRange,
    Strategy,
    StrategyOutcome,
    advice_rows,
    strategy_outcome,
)
from echelon.handbook.guides.trees import TREES, DecisionTree, TreeSteps
from echelon.planner.predict.estimate import estimate_from_inputs
from echelon.planner.predict.split_memory import GuideSplit, cost_inputs_from_split

MICROBATCHES_A_STAGE = 4
"""With so many microbatches a stage the bubble is at most a fifth of a step (distributed-26)."""

WIDE = 2.5
"""From so many times the hidden width on an MLP is called wide (GPT: 4, Llama: 2.7 to 3.5)."""

_SLOW_NETWORK = 10e9
"""Bytes/s one way below which gradients take long: 70B over 32 ranks, 35 s at 0.125e9 (claim
distributed-51)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """Hold one practice, in our words, and the ids of its lints."""

    id: str
    source: str
    says: str
    lints: tuple[str, ...] = ()
    instead: str = ""


PRACTICES = tuple(Practice(**row) for row in advice_rows("practice"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Name an axis, a factor and the question whose yes is a reason to raise its degree."""

    id: str
    axis: Literal["tp", "pp", "dp"]
    factor: str
    question: GuideQuestion


def _wide(situation: Situation) -> GuideAnswer:
    model = situation.model
    ffn = model.ffn if model.experts is None else model.experts.ffn
    return GuideAnswer(
        yes=ffn >= WIDE * model.hidden,
        why=f"inner width {ffn:,} / hidden {model.hidden:,} = {ffn / model.hidden:.2f}; "
        f"{WIDE} asked",
    )


def _many_microbatches(situation: Situation) -> GuideAnswer:
    stages = max(2, situation.num_domains)
    ranks = max(1, situation.num_devices // (stages * situation.domain))
    count = situation.global_sequences // (situation.microbatch_sequences * ranks)
    return GuideAnswer(
        yes=count >= MICROBATCHES_A_STAGE * stages,
        why=f"{count:,} microbatches for {stages} stages; {MICROBATCHES_A_STAGE * stages} asked",
    )


def _large_batch(situation: Situation) -> GuideAnswer:
    ranks = situation.global_sequences // situation.microbatch_sequences
    return GuideAnswer(
        yes=ranks >= situation.num_devices,
        why=f"{ranks:,} microbatches a step for {situation.num_devices:,} devices",
    )


def _network(situation: Situation) -> GuideAnswer:
    link = situation.between or situation.inside
    if link is None:
        return GuideAnswer(yes=False, why="one device")
    return GuideAnswer(
        yes=link.bandwidth >= _SLOW_NETWORK,
        why=f"{link.name}: {link.bandwidth / GB:,.1f} GB/s one way; {_SLOW_NETWORK / GB:.0f} asked",
    )


def _not(question: GuideQuestion, text: str) -> GuideQuestion:
    def ask(situation: Situation) -> GuideAnswer:
        found = question.ask(situation)
        return GuideAnswer(yes=not found.yes, why=found.why)

    return GuideQuestion(text=text, ask=ask)


_WIDE_MLP = GuideQuestion(text="Is the MLP wide?", ask=_wide)
_LARGE_BLOCK = _not(BLOCK_FITS, "Is one block too large for a device?")
_MICROBATCHES = GuideQuestion(
    text="Are there many microbatches for each stage?", ask=_many_microbatches
)
_TOO_LARGE = _not(FITS_ONE, "Are there too many blocks for one device?")
_CARRIES = GuideQuestion(text="Can the network carry gradients?", ask=_network)
_BATCH = GuideQuestion(text="Is the batch large enough for all devices?", ask=_large_batch)

PREFERENCES = (
    Preference(id="prefer-tp-link", axis="tp", factor="links", question=FAST_INSIDE),
    Preference(id="prefer-tp-wide", axis="tp", factor="model", question=_WIDE_MLP),
    Preference(id="prefer-tp-block", axis="tp", factor="memory", question=_LARGE_BLOCK),
    Preference(id="prefer-pp-nodes", axis="pp", factor="links", question=MANY_NODES),
    Preference(id="prefer-pp-deep", axis="pp", factor="model", question=DEEP),
    Preference(id="prefer-pp-batch", axis="pp", factor="batch", question=_MICROBATCHES),
    Preference(id="prefer-pp-memory", axis="pp", factor="memory", question=_TOO_LARGE),
    Preference(id="prefer-dp-network", axis="dp", factor="links", question=_CARRIES),
    Preference(id="prefer-dp-batch", axis="dp", factor="batch", question=_BATCH),
    Preference(id="prefer-dp-fits", axis="dp", factor="memory", question=FITS_ONE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Hold one row: weights in 1e9 and devices that it is for, its advice, and its weak corner.

    `positions` are the least, and `experts` whether it is for mixtures of experts only.
    """

    id: str
    billions: tuple[float, float]
    devices: DegreeRange
    strategy: Strategy
    corner: str
    positions: int = 1
    experts: bool = False

    def covers(self, situation: Situation) -> bool:
        """Return whether a situation is inside of the ranges of the row."""
        (least, most), billions = self.billions, situation.num_parameters / 1e9
        return (
            least <= billions <= most
            and situation.num_devices in self.devices
            and situation.positions >= self.positions
            and (not self.experts or situation.model.experts is not None)
        )


SIZE_GUIDE = "llm-training, section 10"
"""Where the rows stand."""
SIZES = tuple(SizeRow(**row) for row in advice_rows("size"))


def rows_for(situation: Situation) -> tuple[SizeRow, ...]:
    """Return the rows whose ranges a situation is in."""
    return tuple(row for row in SIZES if row.covers(situation))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayout:
    """Hold a layout that a guide names."""

    id: str
    """Its name in the list."""
    source: str
    """Where it stands."""
    name: str
    """What it is called there."""
    parameters: float
    """Weights psi of the model."""
    mesh: Mesh
    """Its mesh."""
    memory_bytes: float
    """Bytes of memory of a device."""
    zero: ZeroStage = 0
    """Its ZeRO stage."""
    expert_parameters: float = 0.0
    """Weights of `parameters` that are routed experts'."""

    @property
    def states_bytes(self) -> float:
        """Return the bytes of model state of a rank, in mixed precision."""
        mesh, data = self.mesh, self.mesh.dp * self.mesh.cp
        dense = (self.parameters - self.expert_parameters) / (mesh.tp * mesh.pp)
        total = model_states(dense, self.zero, data, MIXED_PRECISION).total
        if self.expert_parameters:
            share = self.expert_parameters / (mesh.pp * mesh.ep)
            total += model_states(share, self.zero, mesh.expert_shard_degree(expert_tp=1)).total
        return total

    @property
    def fits(self) -> bool:
        """Return whether the model states fit; activations come on top."""
        return self.states_bytes <= self.memory_bytes


NAMED = tuple(NamedLayout(**row) for row in advice_rows("layout"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyKind:
    """Name a strategy of the tables, what it cuts and sends in a step, and the claims about it."""

    strategy: Strategy
    cuts: str
    sends: str
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """Hold what a kind comes to; no outcome where it cannot use all devices."""

    kind: StrategyKind
    outcome: StrategyOutcome | None
    step_s: float | None
    across_nodes: tuple[str, ...]


STRATEGY_KINDS = tuple(StrategyKind(**row) for row in advice_rows("kind"))


def compare_strategies(
    situation: PlanSituation, software: TrainerConstants
) -> Iterator[StrategyRow]:
    """Yield every strategy with the situation's numbers; seconds are those of a trainer."""
    for kind in STRATEGY_KINDS:
        found = strategy_outcome(kind.strategy, situation)
        yield StrategyRow(
            kind=kind,
            outcome=found,
            step_s=None
            if found is None or not found.fits
            else step_seconds_of(situation.plan, found.split, kind.strategy, software),
            across_nodes=() if found is None else across_nodes(found.split, situation.domain),
        )


def step_seconds_of(
    plan: Plan, split: GuideSplit, strategy: Strategy, software: TrainerConstants
) -> float:
    """Return the seconds of a step of the model and batch of `plan`, split otherwise."""
    work = replace(cost_inputs_from_split(plan, split, strategy.recompute), software=software)
    return estimate_from_inputs(work, plan.mathematics, plan.cluster).step_s


def across_nodes(split: GuideSplit, domain: int) -> tuple[str, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Hold what one guide says: the strategy, what it comes to, and the steps that led there.

    A row of the size guide has no tree, but a `note`: the corner at which it is known to fail.
    """

    id: str
    source: str
    strategy: Strategy
    outcome: StrategyOutcome | None
    tree: DecisionTree | None = None
    steps: TreeSteps = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SituationAdvice:
    """Hold all advice for a situation, and where it conflicts.

    A conflict says by their ids which two guides no plan can follow both, and where they differ.
    """

    situation: PlanSituation
    advice: tuple[Advice, ...]
    preferences: tuple[tuple[Preference, GuideAnswer], ...]
    conflicts: tuple[tuple[str, str, tuple[str, ...]], ...]

    def against(self, plan: Plan) -> tuple[tuple[Advice, tuple[str, ...]], ...]:
        """Return each advice with what `plan` does otherwise; nothing where they agree."""
        return tuple((advice, advice.strategy.differs_from(plan)) for advice in self.advice)


def advise(situation: PlanSituation) -> SituationAdvice:
    """Return what every tree and every row of the size guide says of a situation."""
    advice = (*_of_trees(situation), *_of_sizes(situation))
    conflicts = (
        (one.id, other.id, one.strategy.conflicts_with(other.strategy))
        for one, other in combinations(advice, 2)
    )
    return SituationAdvice(
        situation=situation,
        advice=advice,
        preferences=tuple((each, each.question.ask(situation)) for each in PREFERENCES),
        conflicts=tuple(conflict for conflict in conflicts if conflict[2]),
    )


def _of_trees(situation: PlanSituation) -> Iterator[Advice]:
    for tree in TREES:
        steps, strategy = tree.walk(situation)
        yield Advice(
            id=tree.id,
            source=tree.source,
            strategy=strategy,
            outcome=strategy_outcome(strategy, situation),
            tree=tree,
            steps=steps,
        )


def _of_sizes(situation: PlanSituation) -> Iterator[Advice]:
    for row in rows_for(situation):
        yield Advice(
            id=row.id,
            source=SIZE_GUIDE,
            strategy=row.strategy,
            outcome=strategy_outcome(row.strategy, situation),
            note=row.corner,
        )
