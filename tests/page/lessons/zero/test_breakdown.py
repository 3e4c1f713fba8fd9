"""Five kinds of model state at each stage: 16, 7, 5.5 and 4 bytes a weight on four ranks."""

from __future__ import annotations

import pytest

from echelon.cost.bytes.model_sizes import STAGES, model_states
from echelon.page.lessons.zero import KINDS, SHOWN, held_by_kind, zero_breakdown
from echelon.planner.view.document import BarsFigure
from tests.page.lessons.reading import facts, figure, holds

GB = 1e9


@pytest.mark.system("S58")
def test_a_weight_takes_16_then_7_then_5_5_then_4_bytes() -> None:
    frames = zero_breakdown().scene(size="one weight").frames
    bars = figure(frames[-1], BarsFigure)
    assert [row.total for row in bars.rows] == holds("distributed-33") == [16, 7, 5.5, 4]
    assert [facts(frame)["a rank holds"] for frame in frames] == [
        "16 bytes",
        "7 bytes",
        "5.5 bytes",
        "4 bytes",
    ]


@pytest.mark.system("S58")
def test_the_table_of_a_7b_model_has_every_cell() -> None:
    table = zero_breakdown().scene(size="7B").table
    assert table is not None
    assert [row[:4] for row in table.rows] == [
        ("0", "14.00 GB", "14.00 GB", "84.00 GB"),
        ("1", "14.00 GB", "14.00 GB", "21.00 GB (1/4)"),
        ("2", "14.00 GB", "3.50 GB (1/4)", "21.00 GB (1/4)"),
        ("3", "3.50 GB (1/4)", "3.50 GB (1/4)", "21.00 GB (1/4)"),
    ]
    assert [row[4].partition(" = ")[0] for row in table.rows] == [
        "112.00 GB",
        "49.00 GB",
        "38.50 GB",
        "28.00 GB",
    ]
    savings = [float(row[5].rstrip("x")) for row in table.rows[1:]]
    claimed = [holds(f"llm-training-23{letter}")[1] for letter in "abc"]
    assert savings == pytest.approx(claimed, abs=0.006)


def test_kinds_add_up_to_the_states() -> None:
    for stage in STAGES:
        parts = held_by_kind(7e9, stage)
        states = model_states(7e9, stage, 4)
        assert sum(parts) == states.total
        assert sum(parts[2:]) == states.optimizer
        # Two moments in fp32, and a copy that is as large as each.
        assert parts[2] == parts[3] == parts[4]


@pytest.mark.parametrize("shown", [name for name in SHOWN if name != "everything"])
def test_a_highlight_leaves_the_other_kinds_out(shown: str) -> None:
    lesson = zero_breakdown()
    whole = figure(lesson.scene(shown="everything").frames[-1], BarsFigure)
    frame = lesson.scene(shown=shown).frames[-1]
    for row, full in zip(figure(frame, BarsFigure).rows, whole.rows, strict=True):
        wanted = [v if k in SHOWN[shown] else 0 for k, v in zip(KINDS, full.values, strict=True)]
        assert list(row.values) == wanted
        assert row.total == sum(wanted)
    assert "highlighted" in facts(frame)
