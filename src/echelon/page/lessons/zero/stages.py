# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of the model state at each stage of ZeRO, and what it sends in a step."""

from __future__ import annotations

from echelon.core.plan import ZeroStage
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    communication_volume,
    model_states,
    states_formula,
)
from echelon.page.document import Fact
from echelon.page.figures import BarRow, BarsFigure, DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

WEIGHTS = {"7B": 7e9, "70B": 70e9}
RANKS = (1, 2, 4, 8, 64)  # data ranks
_KINDS = ("parameters", "gradients", "optimizer")
_CONTROLS = (
    LessonControl(name="weights", label="weights", values=tuple(WEIGHTS)),
    LessonControl(
        name="ranks", label="data ranks N", values=tuple(map(str, RANKS)), start=RANKS.index(4)
    ),
)
_SHARED = (
    "Every rank holds everything: parameters, gradients and optimizer state.",
    "Stage 1: each rank keeps 1/N of the optimizer state, and updates that share of the weights.",
    "Stage 2: gradients are reduced to the rank whose share they are, and held by it alone.",
    "Stage 3: parameters are shared out, too, and gathered for a layer while it is computed.",
)


def zero_stages() -> Lesson:
    """Return the lesson: a bar for each stage, and one frame after the other."""
    return Lesson(
        id="zero-stages",
        topic="ZeRO",
        title="What a rank holds at ZeRO stages 0 to 3",
        rows=("M9", "M15", "E20"),
        summary=(
            "Model state in mixed precision is 16 bytes a weight. Each stage shares out one more "
            "kind of it over N data ranks."
        ),
        source="the formulas of echelon explain and of the planner",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(WEIGHTS[chosen["weights"]], int(chosen["ranks"]))
            for chosen in choices(_CONTROLS)
        ),
        corrections=corrections("llm-training-04", "llm-training-05", "llm-training-06"),
    )


def _scene(weights: float, ranks: int) -> Scene:
    frames = tuple(_frame(weights, ranks, stage) for stage in STAGES)
    rows = [
        (str(stage), states_formula(stage), *map(decimal_bytes, _held(weights, ranks, stage)))
        for stage in STAGES
    ]
    return Scene(
        frames=frames,
        table=DataTable(
            head=("stage", "bytes", *_KINDS), rows=tuple(rows), right=tuple(range(2, 5))
        ),
    )


def _frame(weights: float, ranks: int, stage: ZeroStage) -> Frame:
    shown = STAGES[: stage + 1]
    total = sum(_held(weights, ranks, stage))
    sent = communication_volume(stage).sent_bytes(weights, ranks, MIXED_PRECISION.parameters)
    return Frame(
        caption=_SHARED[stage],
        figures=(
            BarsFigure(
                kinds=_KINDS,
                limit=0.0,
                limit_text="",
                rows=tuple(_bar(weights, ranks, one) for one in shown),
            ),
        ),
        facts=(
            Fact(name="a rank holds", value=decimal_bytes(total), note=states_formula(stage)),
            Fact(
                name="a rank sends in a step",
                value=decimal_bytes(sent),
                note=f"{communication_volume(stage).multiples} (N-1)/N psi, 2 bytes a weight",
            ),
        ),
    )


def _bar(weights: float, ranks: int, stage: ZeroStage) -> BarRow:
    held = _held(weights, ranks, stage)
    whole = MIXED_PRECISION.total * weights
    return BarRow(
        label=f"stage {stage}",
        values=held,
        texts=tuple(map(decimal_bytes, held)),
        total=sum(held),
        total_text=decimal_bytes(sum(held)),
        share_text=f"{100 * sum(held) / whole:.1f} %",
        over=False,
    )


def _held(weights: float, ranks: int, stage: ZeroStage) -> tuple[float, ...]:
    states = model_states(weights, stage, ranks)
    return states.parameters, states.gradients, states.optimizer
