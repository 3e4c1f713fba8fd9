"""Refusals of a writer: one for each setting, the first that holds, with what might do instead."""

from __future__ import annotations

import pytest

from echelon.interop.tool_writer import ExportRefusal, refusals
from echelon.interop.tools import WRITTEN_TOOLS, WrittenToolName
from tests.interop.plans import job_of


def test_the_first_condition_that_holds_refuses_its_setting() -> None:
    found = list(
        refusals(
            (False, "mesh.pp", 2, "does not hold", ()),
            (True, "zero.stage", 3, "first", (2, 1)),
            (1, "zero.stage", 3, "second", (0,)),
            ([], "mesh.cp", 2, "nothing is false, too", ()),
            (True, "mesh.tp", 2, "another", ()),
        )
    )
    assert found == [
        ExportRefusal(
            setting="zero.stage",
            value=3,
            why="first",
            suggestions=({"zero.stage": 2}, {"zero.stage": 1}),
        ),
        ExportRefusal(setting="mesh.tp", value=2, why="another"),
    ]


@pytest.mark.parametrize("name", WRITTEN_TOOLS)
def test_what_a_writer_makes_stands_in_its_file(name: WrittenToolName) -> None:
    plan = job_of(()).plan
    writer = WRITTEN_TOOLS[name].writer
    text = writer.render(writer.keys(plan, {}), ["a line"], {"zero.prefetch": 2})
    recorded = '"zero.prefetch": 2' if name == "deepspeed" else "# echelon: zero.prefetch = 2"
    assert "a line" in text
    assert recorded in text
    assert not list(writer.unsupported(plan))
    assert all(isinstance(line, str) for line in writer.advice(plan))
