# SPDX-License-Identifier: Apache-2.0
"""How parameters become gigabytes: every byte of model state, unfolded line by line."""

from __future__ import annotations

from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    model_states,
    states_formula,
)
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import Fold, FoldsFigure
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

WEIGHTS = {"7B": 7_000_000_000, "13B": 13_000_000_000, "70B": 70_000_000_000}
RANKS = (1, 4, 8, 64)  # data ranks
BITS = 8  # of a byte
_CONTROLS = (
    LessonControl(name="weights", label="parameters psi", values=tuple(WEIGHTS)),
    LessonControl(
        name="ranks", label="data ranks N", values=tuple(map(str, RANKS)), start=RANKS.index(4)
    ),
)
_PARTS = (
    ("parameters", MIXED_PRECISION.parameters, "bf16 or fp16"),
    ("gradients", MIXED_PRECISION.gradients, "bf16 or fp16, one for each parameter"),
    ("master copy", MIXED_PRECISION.master, "fp32: small updates would round to nothing in bf16"),
    ("first moment", MIXED_PRECISION.moments // 2, "fp32: a running mean of gradients"),
    ("second moment", MIXED_PRECISION.moments // 2, "fp32: a running mean of their squares"),
)


def memory_guide() -> Lesson:
    """Return the guide: parts of model state, and what each stage of ZeRO leaves."""
    return Lesson(
        id="guide-memory",
        topic="Guides",
        title="How 7B parameters become 112 GB",
        rows=("M25",),
        summary=(
            "A number takes as many bytes as its type says. Mixed precision with Adam keeps five "
            "numbers for each parameter: 16 bytes in all. Unfold each part."
        ),
        source="the formulas of model states that echelon explain zero prints",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(WEIGHTS[one["weights"]], int(one["ranks"])) for one in choices(_CONTROLS)
        ),
        corrections=corrections("llm-training-18", "llm-training-20", "distributed-42"),
        commands=("echelon explain zero --parameters 7B --dp 4",),
    )


def _scene(weights: int, ranks: int) -> Scene:
    total = MIXED_PRECISION.total * weights
    frame = Frame(
        caption=(
            f"{short_count(weights)} parameters take {decimal_bytes(total)} of model state, before "
            "any activation."
        ),
        figures=(
            FoldsFigure(folds=(*(_part(weights, *one) for one in _PARTS), _together(weights))),
            FoldsFigure(folds=tuple(_stage(weights, ranks, place) for place in range(len(STAGES)))),
        ),
        facts=(
            Fact(
                name="model states",
                value=decimal_bytes(total),
                note=f"{MIXED_PRECISION.total} x {weights:,} bytes",
            ),
            Fact(name="the same in GiB", value=binary_bytes(total)),
            Fact(
                name="optimizer state",
                value=f"{100 * MIXED_PRECISION.optimizer / MIXED_PRECISION.total:.0f} % of it",
            ),
        ),
    )
    rows = tuple((name, str(size), decimal_bytes(size * weights)) for name, size, _ in _PARTS)
    head = ("", "bytes each", "together")
    return Scene(frames=(frame,), table=DataTable(head=head, rows=rows, right=(1, 2)))


def _part(weights: int, name: str, size: int, why: str) -> Fold:
    return Fold(
        title=name,
        result=decimal_bytes(size * weights),
        lines=(
            f"{why}.",
            f"{BITS * size} bits / {BITS} = {size} bytes for each number.",
            f"{size} x {weights:,} = {size * weights:,} bytes = {decimal_bytes(size * weights)}.",
        ),
    )


def _together(weights: int) -> Fold:
    sizes = [size for _, size, _ in _PARTS]
    total = sum(sizes) * weights
    return Fold(
        title="together",
        result=decimal_bytes(total),
        lines=(
            f"{' + '.join(map(str, sizes))} = {sum(sizes)} bytes for each parameter.",
            f"{sum(sizes)} x {weights:,} = {total:,} bytes.",
            f"{total:,} / 10^9 = {decimal_bytes(total)}.",
            f"{total:,} / 2^30 = {binary_bytes(total)}: the same bytes in binary units.",
        ),
    )


def _stage(weights: int, ranks: int, place: int) -> Fold:
    stage = STAGES[place]
    states = model_states(weights, stage, ranks)
    parts = (
        ("parameters", states.parameters, MIXED_PRECISION.parameters),
        ("gradients", states.gradients, MIXED_PRECISION.gradients),
        ("optimizer state", states.optimizer, MIXED_PRECISION.optimizer),
    )
    lines = [
        f"{name}: {size} x {weights:,}{f' / {ranks}' if held < size * weights else ''} = "
        f"{decimal_bytes(held)}."
        for name, held, size in parts
    ]
    shown = " + ".join(decimal_bytes(held) for _, held, _ in parts)
    return Fold(
        title=f"ZeRO stage {stage}, a rank of {ranks}: {states_formula(stage)}",
        result=decimal_bytes(states.total),
        lines=(*lines, f"{shown} = {decimal_bytes(states.total)}."),
    )
