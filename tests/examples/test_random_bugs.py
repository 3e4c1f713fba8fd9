"""Random changes of one line give other programs, and the prover has a name for each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.examples.changes import changes_of, random_change
from tests.examples.programs import RIGHT, TORCH
from tests.examples.random_bugs import Verdict, planted, told

SOURCE = """MESH = {"dp": 2, "tp": 2}
RATE = 0.1

def one_device(case):
    return made(case, RATE)

def on_rank(case):
    if case.rank == 0:
        warm(up=True)
    total = loss(x, y) / 4
    reduce(total, group=mesh["dp"])
    return total
"""


def test_every_kind_of_change_is_one_line_of_a_rank() -> None:
    every = changes_of(SOURCE)
    lines = {f"{one.sort}: {one.after}" for one in every}
    assert {
        "comparison: if case.rank != 0:",
        "flag: warm(up=False)",
        "arguments: total = loss(y, x) / 4",
        "operator: total = loss(x, y) * 4",
        "number: total = loss(x, y) / 8",
        "keyword: reduce(total)",
        "axis: reduce(total, group=mesh['tp'])",
    } <= lines
    assert "without: reduce(total, group=mesh['dp'])" in {one.kind for one in every}
    assert all("made(case, RATE)" in one.source for one in every)
    assert random_change(SOURCE, random.Random(3)) == random_change(SOURCE, random.Random(3))


@pytest.mark.slow
def test_changes_are_sorted_by_what_is_said() -> None:
    said: list[Path] = []

    def prove(file: Path) -> Verdict:
        said.append(file)
        return Verdict(rule="prove-loss", tensor="loss", factor="none", says="another")

    found = list(planted(("ddp",), 3, 1, prove))
    assert [one.outcome for one in found] == ["weak"] * 3
    assert len(said) == 3
    assert Verdict(proven=True).outcome == "equal"
    assert Verdict(rule="verify-raised").outcome == "refused"
    assert Verdict(rule="r", factor="2").outcome == "named"
    assert Verdict(rule="r", factor="none", says="5 is the first wrong one").outcome == "placed"
    assert set(TORCH) <= {file.stem for file in RIGHT.glob("*.py")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_random_bugs_have_names() -> None:
    with RankPool(4, still_s=4.0) as pool:
        found = list(planted(TORCH, 10, 1, told(pool)))
    weak = [(one.program, one.before, one.after) for one in found if one.outcome == "weak"]
    assert weak == []
