# SPDX-License-Identifier: Apache-2.0
"""Best practices and pitfalls of the guides with their lints, and reasons to raise a degree.

Where nothing in a plan can show whether a practice was followed, `instead` says what to do.

The reasons are the table of llm-training, section 8, as questions of a situation: each cell is one
to raise tp, pp or dp; what it leaves vague ("high", "many") is a number here. They do not decide,
they are shown beside the trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.core.units import GB
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
from echelon.handbook.guides.strategy import advice_rows

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
