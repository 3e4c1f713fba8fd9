# SPDX-License-Identifier: Apache-2.0
"""Sizes, best practices and pitfalls of the guides, and their reasons to raise a degree.

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

from dataclasses import dataclass
from typing import Literal

from echelon.core.mesh import Mesh
from echelon.core.plan import ZeroStage
from echelon.core.units import GB
from echelon.cost.bytes.model_sizes import MIXED_PRECISION, model_states
from echelon.handbook.guides.situation import (
    BLOCK_FITS,
    DEEP,
    FAST_INSIDE,
    FITS_ONE,
    MANY_NODES,
    GuideAnswer,
    GuideQuestion,
    Situation,
)
from echelon.handbook.guides.strategy import DegreeRange, Strategy, advice_rows

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
