"""The log of a step has what a rank does, in order, and counts nothing another way."""

from __future__ import annotations

import torch

from echelon.rehearsal.memory import HOST
from echelon.rehearsal.order import Issue, RankLog
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.rehearsal.traces import (
    Awaited,
    Held,
    HostWaited,
    Issued,
    Kernel,
    StepLog,
    SteppedLog,
    SteppedMemory,
    SteppedWork,
)

ISSUE = Issue(
    communicator="dp", members=(0, 1), kind="all_reduce", num_bytes=4, dtype="float32", name="g"
)


def test_what_a_rank_does_stands_in_its_order() -> None:
    step = StepLog()
    log = SteppedLog(0, step)
    shapes = ShapesOnly(log, memory=SteppedMemory(step), work=SteppedWork(step))
    with shapes:
        shapes.memory.now()
        a = torch.empty(4, device=META)
        b = a + 1
        number = log.issue(ISSUE)
        log.wait(number)
        b.sum().item()
        with shapes.memory.within(HOST):
            torch.empty(8, device=META)
    kinds = [type(item) for item in step.items]
    assert kinds[:3] == [Held, Held, Kernel]  # a; b and its kernel
    assert kinds[3:5] == [Issued, Awaited]
    assert HostWaited in kinds
    assert step.items[1] == Held({"other": 32})
    assert step.items[2] == Kernel("add", 32, 0)
    assert all("host" not in item.by_term for item in step.items if isinstance(item, Held))
    kernels = sum(isinstance(item, Kernel) for item in step.items)
    assert kernels == sum(work.kernels for work in shapes.work.by_task.values())
    assert len(log.entries) == 3


def test_a_step_forgets_the_one_before() -> None:
    step = StepLog()
    log, plain = SteppedLog(0, step), RankLog(0)
    for one in (log, plain):
        one.wait(one.issue(ISSUE))
    assert log.entries == plain.entries
    step.step_began({"parameters": 8})
    assert step.items == [Held({"parameters": 8})]
