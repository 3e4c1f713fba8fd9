"""The guide of bytes: every line adds up, and 7B are 112 GB."""

from __future__ import annotations

import re

import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import STAGES, model_states
from echelon.page.lessons.guides.memory import WEIGHTS, memory_guide
from echelon.page.lessons.lesson import FoldsFigure, Scene, choices
from tests.page.lessons.reading import facts, holds


def folds(scene: Scene) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {
        fold.title: (fold.result, fold.lines)
        for figure in scene.frames[0].figures
        if isinstance(figure, FoldsFigure)
        for fold in figure.folds
    }


@pytest.mark.system("S58")
def test_7b_parameters_are_112_gb_and_104_gib() -> None:
    scene = memory_guide().scene(weights="7B", ranks="4")
    told = facts(scene.frames[0])
    assert told["model states"] == f"{holds('llm-training-12')}.00 GB" == "112.00 GB"
    assert told["the same in GiB"] == f"{holds('llm-training-21')} GiB"
    assert told["optimizer state"] == f"{100 * holds('llm-training-22'):.0f} % of it"
    found = folds(scene)
    one, three = holds("llm-training-19")
    adam = ("master copy", "first moment", "second moment")
    assert [found[name][0] for name in adam] == [f"{one}.00 GB"] * 3
    assert 3 * one == three
    stages = [result for title, (result, _) in found.items() if title.startswith("ZeRO")]
    assert stages == ["112.00 GB", "49.00 GB", "38.50 GB", "28.00 GB"]


def test_each_line_that_multiplies_is_right() -> None:
    lesson = memory_guide()
    counted = 0
    for chosen, scene in zip(choices(lesson.controls), lesson.scenes, strict=True):
        weights, ranks = WEIGHTS[chosen["weights"]], int(chosen["ranks"])
        for _, lines in folds(scene).values():
            for line in lines:
                found = re.search(
                    r"(\d+) x ([\d,]+)(?: / (\d+))? = (?:([\d,]+) bytes|(.*?)\.$)", line
                )
                if not found:
                    continue
                size, count = int(found[1]), int(found[2].replace(",", ""))
                value = size * count / int(found[3] or 1)
                assert count == weights
                if found[4]:
                    assert int(found[4].replace(",", "")) == value
                else:
                    assert found[5] == decimal_bytes(value)
                counted += 1
        stages = [one for one in folds(scene) if one.startswith("ZeRO")]
        for stage, title in zip(STAGES, stages, strict=True):
            held = model_states(weights, stage, ranks).total
            assert folds(scene)[title][0] == decimal_bytes(held)
    assert counted > 100
