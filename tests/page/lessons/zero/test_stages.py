"""What a rank holds at each stage of ZeRO: the figures of the guides, at N = 4."""

from __future__ import annotations

import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import STAGES, communication_volume, model_states
from echelon.page.lessons.lesson import choices
from echelon.page.lessons.zero import WEIGHTS, zero_stages
from echelon.planner.view.document import BarsFigure
from tests.page.lessons.reading import facts, figure, holds

GB = 1e9


@pytest.mark.system("S58", "E20")
def test_7b_on_four_ranks_holds_112_then_49_then_38_5_then_28() -> None:
    frames = zero_stages().scene(weights="7B", ranks="4").frames
    held = [facts(frame)["a rank holds"] for frame in frames]
    assert held == ["112.00 GB", "49.00 GB", "38.50 GB", "28.00 GB"]
    last = figure(frames[-1], BarsFigure)
    assert [row.total / GB for row in last.rows] == [112, 49, 38.5, 28]
    assert [row.total_text for row in last.rows] == held
    ids = ("llm-training-12", *(f"llm-training-23{letter}" for letter in "abc"))
    claimed = [one if isinstance(one, int) else one[0] for one in map(holds, ids)]
    assert [row.total / GB for row in last.rows] == claimed
    # Optimizer state is 84 GB whole, and 21 GB at every stage that shares it out.
    assert [row.values[2] / GB for row in last.rows] == [84, 21, 21, 21]


def test_every_scene_is_that_of_the_formulas() -> None:
    lesson = zero_stages()
    for chosen, scene in zip(choices(lesson.controls), lesson.scenes, strict=True):
        weights, ranks = WEIGHTS[chosen["weights"]], int(chosen["ranks"])
        for stage, frame in zip(STAGES, scene.frames, strict=True):
            states = model_states(weights, stage, ranks)
            sent = communication_volume(stage).sent_bytes(weights, ranks, 2)
            assert facts(frame) == {
                "a rank holds": decimal_bytes(states.total),
                "a rank sends in a step": decimal_bytes(sent),
            }
            rows = figure(frame, BarsFigure).rows
            assert len(rows) == stage + 1
            assert rows[-1].values == (states.parameters, states.gradients, states.optimizer)
