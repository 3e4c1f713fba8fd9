# SPDX-License-Identifier: Apache-2.0
"""Where each byte of a rank comes from: five kinds of model state, at each stage of ZeRO."""

from __future__ import annotations

from echelon.core.messages.plurals import in_singular
from echelon.core.plan import ZeroStage
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    ModelStates,
    memory_saving,
    model_states,
    states_formula,
)
from echelon.page.document import Fact
from echelon.page.figures import BarRow, BarsFigure, DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

SIZES = {"7B": 7e9, "one weight": 1.0}
RANKS = 4  # data ranks, as published guides take them
KINDS = ("parameters", "gradients", "master copy", "first moment", "second moment")
SHOWN = {
    "everything": KINDS,
    "parameters": KINDS[:1],
    "gradients": KINDS[1:2],
    "optimizer state": KINDS[2:],
}
_CONTROLS = (
    LessonControl(name="size", label="bytes of", values=tuple(SIZES)),
    LessonControl(name="shown", label="highlight", values=tuple(SHOWN)),
)
_CUT = (
    "Nothing is shared out: each rank holds all five kinds whole.",
    "Stage 1 shares out optimizer state: the master copy and both moments.",
    "Stage 2 shares out gradients, too.",
    "Stage 3 shares out everything.",
)


def zero_breakdown() -> Lesson:
    """Return the lesson: a bar of five kinds for each stage."""
    return Lesson(
        id="zero-breakdown",
        topic="ZeRO",
        title=f"Every byte of a rank, on {RANKS} data ranks",
        rows=("M9", "M14"),
        summary=(
            "A weight takes 2 bytes of parameter, 2 of gradient and 12 of optimizer state. What a "
            "stage shares out is divided by N."
        ),
        source="the formulas of model states that echelon explain zero prints",
        controls=_CONTROLS,
        scenes=tuple(_scene(SIZES[one["size"]], SHOWN[one["shown"]]) for one in choices(_CONTROLS)),
        corrections=corrections(
            "distributed-33",
            "distributed-35",
            "distributed-37",
            "llm-training-20",
            "llm-training-24",
        ),
        commands=(f"echelon explain zero --parameters 7B --dp {RANKS}",),
    )


def held_by_kind(weights: float, stage: ZeroStage, ranks: int = RANKS) -> tuple[float, ...]:
    """Return the bytes of a rank by the kinds of `KINDS`."""
    held = model_states(weights, stage, ranks)
    share = held.optimizer / MIXED_PRECISION.optimizer
    moment = MIXED_PRECISION.moments / 2
    parts = share * MIXED_PRECISION.master, share * moment, share * moment
    return held.parameters, held.gradients, *parts


def _scene(weights: float, shown: tuple[str, ...]) -> Scene:
    rows = tuple(
        (
            str(stage),
            *(_cell(weights, stage, value) for value in _three(weights, stage)),
            f"{decimal_bytes(_held(weights, stage).total)} = {states_formula(stage)}",
            f"{memory_saving(stage, RANKS):.2f}x",
        )
        for stage in STAGES
    )
    return Scene(
        frames=tuple(_frame(weights, stage, shown) for stage in STAGES),
        table=DataTable(
            head=("stage", "parameters", "gradients", "optimizer state", "together", "saving"),
            rows=rows,
            right=(1, 2, 3, 5),
        ),
    )


def _frame(weights: float, stage: ZeroStage, shown: tuple[str, ...]) -> Frame:
    held = _held(weights, stage)
    seen = [
        value
        for kind, value in zip(KINDS, held_by_kind(weights, stage), strict=True)
        if kind in shown
    ]
    facts = [
        Fact(
            name="a rank holds",
            value=_bytes(weights, held.total),
            note=f"{states_formula(stage)}, N = {RANKS}",
        ),
        Fact(
            name="against stage 0",
            value=f"{memory_saving(stage, RANKS):.2f} times less",
        ),
    ]
    if shown != KINDS:
        share = sum(seen) / held.total
        facts.append(Fact(name="highlighted", value=_bytes(weights, sum(seen)), note=_share(share)))
    return Frame(
        caption=_CUT[stage],
        figures=(
            BarsFigure(
                kinds=KINDS,
                limit=0.0,
                limit_text="",
                rows=tuple(_bar(weights, one, shown) for one in STAGES[: stage + 1]),
            ),
        ),
        facts=tuple(facts),
    )


def _bar(weights: float, stage: ZeroStage, shown: tuple[str, ...]) -> BarRow:
    parts = held_by_kind(weights, stage)
    values = tuple(
        value if kind in shown else 0.0 for kind, value in zip(KINDS, parts, strict=True)
    )
    total = sum(values)
    whole = sum(
        value for kind, value in zip(KINDS, held_by_kind(weights, 0), strict=True) if kind in shown
    )
    return BarRow(
        label=f"stage {stage}",
        values=values,
        texts=tuple(_bytes(weights, value) for value in values),
        total=total,
        total_text=_bytes(weights, total),
        share_text=f"{100 * total / whole:.1f} %",
        over=False,
    )


def _held(weights: float, stage: ZeroStage) -> ModelStates:
    return model_states(weights, stage, RANKS)


def _three(weights: float, stage: ZeroStage) -> tuple[float, float, float]:
    held = _held(weights, stage)
    return held.parameters, held.gradients, held.optimizer


def _cell(weights: float, stage: ZeroStage, value: float) -> str:
    cut = value not in _three(weights, 0)
    return f"{_bytes(weights, value)}{f' (1/{RANKS})' if cut else ''}"


def _bytes(weights: float, value: float) -> str:
    return decimal_bytes(value) if weights > 1 else in_singular(f"{value:g} bytes")


def _share(share: float) -> str:
    return f"{100 * share:.1f} % of it"
