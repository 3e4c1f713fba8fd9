"""Bars of a figure are as long as their bytes or seconds."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from echelon.planner.view.bars_svg import memory_svg, waterfall_svg
from echelon.planner.view.memory import memory_bars
from echelon.planner.view.waterfall import waterfall
from tests.planner.view.figures import (
    number,
    rects,
    texts,
    tip,
)

GIB = 2.0**30


TERMS = {"parameters": 10 * GIB, "gradients": 20 * GIB, "activations": 30 * GIB, "slack": 0.0}


def test_boxes_stand_one_behind_the_other_and_are_as_long_as_their_bytes() -> None:
    figure = memory_svg(memory_bars([("a", TERMS), ("b <&>", TERMS)], 80 * GIB), title="x & y")
    boxes = rects(figure, "box")
    assert [tip(box) for box in boxes[:3]] == [
        "a: parameters 10.00 GiB",
        "a: gradients 20.00 GiB",
        "a: activations 30.00 GiB",
    ]
    assert tip(boxes[3]).startswith("b <&>: ")
    widths = [number(box, "width") for box in boxes[:3]]
    assert widths == pytest.approx([widths[0] * part for part in (1, 2, 3)], abs=0.03)
    for box, after in pairwise(boxes[:3]):
        assert number(after, "x") == pytest.approx(
            number(box, "x") + number(box, "width"), abs=0.02
        )
    idle = re.search(r'class="idle" x="([\d.]+)" y="\d+" width="([\d.]+)"', figure)
    assert idle is not None
    assert float(idle[2]) * 60 / 80 == pytest.approx(sum(widths), abs=0.05)
    assert texts(figure, "key") == ["P parameters", "G gradients", "A activations"]


def test_the_line_of_the_device_stands_where_its_memory_ends() -> None:
    figure = memory_svg(memory_bars([("a", TERMS)], 40 * GIB))
    line = re.search(r'class="limit" x1="([\d.]+)"', figure)
    (over,) = rects(figure, "over")
    assert line is not None
    assert float(line[1]) == pytest.approx(number(over, "x"))
    assert tip(over) == "a: 20.00 GiB too much"
    last = rects(figure, "box")[-1]
    end = number(last, "x") + number(last, "width")
    assert number(over, "x") + number(over, "width") == pytest.approx(end, abs=0.02)


STEP = {
    "matmul": 4.0,
    "attention": 1.0,
    "host": 0.03,
    "tensor": 2.0,
    "context": 0.0,
    "bubble": 1.5,
    "gradients": 1.44,
    "fixed": 0.03,
}


def test_boxes_are_as_long_as_their_seconds_and_join() -> None:
    figure = waterfall_svg(waterfall(STEP), title="a < b")
    found = [box for tone in ("compute", "communication", "idle") for box in rects(figure, tone)]
    boxes = sorted(found, key=lambda box: number(box, "y"))
    assert [tip(box).split(":")[0] for box in boxes] == [
        "matmul",
        "attention",
        "tensor",
        "bubble",
        "gradients",
        "other (host, fixed)",
    ]
    assert tip(boxes[2]) == "tensor: 2.000 s, 20.0 %, exposed communication"
    widths = [number(box, "width") for box in boxes]
    scale = widths[0] / 4
    assert widths[1:5] == pytest.approx([scale, 2 * scale, 1.5 * scale, 1.44 * scale], abs=0.02)
    for box, after in pairwise(boxes):
        end = number(box, "x") + number(box, "width")
        assert number(after, "x") == pytest.approx(end, abs=0.02)
    assert texts(figure, "rank")[-1] == "total"
    assert texts(figure, "key") == [
        "compute 50.0 %",
        "exposed communication 34.4 %",
        "idle 15.6 %",
    ]
