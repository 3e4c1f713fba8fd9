"""32 blocks over pipeline ranks: each block once, the ends heavier."""

from __future__ import annotations

import pytest

from echelon.page.lessons.lesson import DiagramFigure
from echelon.page.lessons.pipeline_stages import pipeline_stages, stage_plan
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58")
def test_32_blocks_are_8_on_each_of_4_ranks() -> None:
    scene = pipeline_stages().scene(p="4")
    whole, cut = (figure(frame, DiagramFigure) for frame in scene.frames)
    blocks = [f"block {number}" for number in range(32)]
    assert [tile.id for tile in whole.places[0].tiles] == ["embedding", *blocks, "head"]
    held = [[tile.id for tile in place.tiles] for place in cut.places]
    assert held == [
        ["embedding", *blocks[:8]],
        blocks[8:16],
        blocks[16:24],
        [*blocks[24:], "head"],
    ]
    assert holds("distributed-04") == 8
    # Activations go from the last block of a stage to the first of the next: three messages.
    assert [(move.source, move.target) for move in cut.moves] == [
        (f"block {last}", f"block {last + 1}") for last in (7, 15, 23)
    ]
    messages = facts(scene.frames[1])["messages of a microbatch, forward"]
    assert int(messages) == holds("llm-training-35") == 3


def test_the_ends_are_heavier_by_what_the_guides_leave_out() -> None:
    table = pipeline_stages().scene(p="4").table
    assert table is not None
    shares = [float(row[3].rstrip(" %")) / 100 for row in table.rows]
    assert shares == pytest.approx(holds("llm-training-34"), abs=5e-5)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_block_is_on_one_rank(ranks: int) -> None:
    cut = figure(pipeline_stages().scene(p=str(ranks)).frames[1], DiagramFigure)
    held = [tile.id for place in cut.places for tile in place.tiles if tile.kind == 0]
    assert held == [f"block {number}" for number in range(stage_plan(ranks).model.layers)]
