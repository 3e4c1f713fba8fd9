"""Names in the page are free, and are no words of its language."""

from __future__ import annotations

from web.formulas.compiler.names import CompiledProgram, Reached, local_name


def test_no_two_things_have_one_name() -> None:
    reached = Reached(program=CompiledProgram(entries=()))
    assert [reached.free_name("one"), reached.free_name("one")] == ["$one", "$one_2"]
    assert (local_name("new"), local_name("old")) == ("new_", "old")
