"""A rank marks progress while its pieces are compiled, and only then."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from echelon.core.choices.kernels import Kernels
from echelon.launch.context import COMPILING
from echelon.parallel.kernels import compile_marks
from echelon.parallel.kernels.compile_marks import CompileMarks
from tests.parallel.layouts import plan_of


def test_plans_that_compile_nothing_have_no_marks() -> None:
    plan = plan_of()
    assert CompileMarks.of_plan(plan, lambda _: None) is None
    unused = replace(plan, layout=replace(plan.layout, kernels=Kernels(provider="compiled")))
    assert CompileMarks.of_plan(unused, lambda _: None) is None


@pytest.mark.slow
def test_marks_come_while_the_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    monkeypatch.setattr(compile_marks, "EVERY_S", 0.01)
    told: list[str] = []
    third = threading.Event()

    def mark(doing: str) -> None:
        told.append(doing)
        if told.count(COMPILING) > 3:
            third.set()

    marks = CompileMarks(mark)
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
        assert third.wait(60.0)
    assert set(told) == {COMPILING, "computing with compiled kernels"}
    assert told[-1] == "computing with compiled kernels"
    count = len(told)
    marks.close()
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/1"):
        pass
    assert len(told) == count
