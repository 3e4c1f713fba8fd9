"""When to raise which degree: the table of guide 003, section 8, as questions of a situation.

Each cell is a reason to raise tp, pp or dp; what the cell leaves vague ("high", "many") is a number
here. Reasons do not decide, they are shown beside the trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.planner.guides.questions import (
    BLOCK_FITS,
    DEEP,
    FAST_INSIDE,
    FITS_ONE,
    MANY_NODES,
    Answer,
    Question,
)
from echelon.planner.guides.situation import GB, Situation

MICROBATCHES_A_STAGE = 4
"""With so many microbatches a stage the bubble is at most a fifth of a step (002-26)."""

WIDE = 2.5
"""From so many times the hidden width on an MLP is called wide (GPT: 4, Llama: 2.7 to 3.5)."""

SLOW_NETWORK = 10e9
"""Bytes/s one way below which gradients take long: 70B over 32 ranks, 35 s at 0.125e9 (002-51)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Name an axis, a factor and the question whose yes is a reason to raise its degree."""

    id: str
    axis: Literal["tp", "pp", "dp"]
    factor: str
    question: Question


def _wide(situation: Situation) -> Answer:
    model = situation.model
    ffn = model.ffn if model.experts is None else model.experts.ffn
    return Answer(
        yes=ffn >= WIDE * model.hidden,
        why=f"inner width {ffn:,} / hidden {model.hidden:,} = {ffn / model.hidden:.2f}; "
        f"{WIDE} asked",
    )


def _many_microbatches(situation: Situation) -> Answer:
    stages = max(2, situation.num_domains)
    ranks = max(1, situation.num_devices // (stages * situation.domain))
    count = situation.global_sequences // (situation.microbatch_sequences * ranks)
    return Answer(
        yes=count >= MICROBATCHES_A_STAGE * stages,
        why=f"{count:,} microbatches for {stages} stages; {MICROBATCHES_A_STAGE * stages} asked",
    )


def _large_batch(situation: Situation) -> Answer:
    ranks = situation.global_sequences // situation.microbatch_sequences
    return Answer(
        yes=ranks >= situation.num_devices,
        why=f"{ranks:,} microbatches a step for {situation.num_devices:,} devices",
    )


def _network(situation: Situation) -> Answer:
    link = situation.between or situation.inside
    if link is None:
        return Answer(yes=False, why="one device")
    return Answer(
        yes=link.bandwidth >= SLOW_NETWORK,
        why=f"{link.name}: {link.bandwidth / GB:,.1f} GB/s one way; {SLOW_NETWORK / GB:.0f} asked",
    )


def _not(question: Question, text: str) -> Question:
    def ask(situation: Situation) -> Answer:
        found = question.ask(situation)
        return Answer(yes=not found.yes, why=found.why)

    return Question(text=text, ask=ask)


PREFERENCES = (
    Preference(id="prefer-tp-link", axis="tp", factor="links", question=FAST_INSIDE),
    Preference(
        id="prefer-tp-wide",
        axis="tp",
        factor="model",
        question=Question(text="Is the MLP wide?", ask=_wide),
    ),
    Preference(
        id="prefer-tp-block",
        axis="tp",
        factor="memory",
        question=_not(BLOCK_FITS, "Is one block too large for a device?"),
    ),
    Preference(id="prefer-pp-nodes", axis="pp", factor="links", question=MANY_NODES),
    Preference(id="prefer-pp-deep", axis="pp", factor="model", question=DEEP),
    Preference(
        id="prefer-pp-batch",
        axis="pp",
        factor="batch",
        question=Question(
            text="Are there many microbatches for each stage?", ask=_many_microbatches
        ),
    ),
    Preference(
        id="prefer-pp-memory",
        axis="pp",
        factor="memory",
        question=_not(FITS_ONE, "Are there too many blocks for one device?"),
    ),
    Preference(
        id="prefer-dp-network",
        axis="dp",
        factor="links",
        question=Question(text="Can the network carry gradients?", ask=_network),
    ),
    Preference(
        id="prefer-dp-batch",
        axis="dp",
        factor="batch",
        question=Question(text="Is the batch large enough for all devices?", ask=_large_batch),
    ),
    Preference(id="prefer-dp-fits", axis="dp", factor="memory", question=FITS_ONE),
)
