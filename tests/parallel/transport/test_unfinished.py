"""Where the host only reads, what it waits for is the oldest operation that has not ended."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path

from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, run_ranks
from echelon.parallel.transport.unfinished import UnfinishedOperations
from tests.parallel.transport import unfinished_targets


class Work:
    """An operation under way."""

    def __init__(self) -> None:
        """Begin."""
        self.done = False

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.done


class Mark:
    """A mark that is passed when it is told so, and that fails where the device has."""

    def __init__(self) -> None:
        """Stand in the queue."""
        self.passed, self.failed = False, False

    def query(self) -> bool:
        """Return whether it is passed."""
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.passed


def test_the_oldest_that_has_not_ended_is_told() -> None:
    marks: list[Mark] = []

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    def oldest() -> tuple[str, int | None] | None:
        found = operations.oldest()
        return None if found is None else (found.name, found.turn)

    operations = UnfinishedOperations(mark, nullcontext)
    assert oldest() is None
    works = [Work(), Work(), Work()]
    first, second, third = (
        operations.issued(f"sum {place}", place, work) for place, work in enumerate(works)
    )
    assert oldest() == ("sum 0", 0)
    works[0].done = True
    assert oldest() == ("sum 1", 1)
    operations.awaited(second)
    works[1].done = True
    assert oldest() == ("sum 1", 1), "the device is not past it, whatever the others are"
    marks[0].passed = True
    assert oldest() == ("sum 2", 2)
    operations.awaited(third)
    marks[1].failed = True
    assert oldest() == ("sum 2", 2)
    marks[1].failed, marks[1].passed = False, True
    operations.awaited(first)
    marks[2].passed = True
    assert oldest() is None


def test_the_work_of_what_was_awaited_is_let_go() -> None:
    operations = UnfinishedOperations(Mark, nullcontext)
    work = Work()
    held = weakref.ref(work)
    operation = operations.issued("sum", None, work)
    del work
    assert held() is not None
    operations.awaited(operation)
    gc.collect()
    assert held() is None, "it would keep the tensors that it wrote"


def test_ranks_that_hang_in_a_read_are_told_by_their_operations(tmp_path: Path) -> None:
    outcome = run_ranks(
        unfinished_targets.read_what_never_comes,
        {},
        world_size=2,
        labels=("pp0", "pp1"),
        log_dir=tmp_path,
        options=LaunchOptions(limits=Limits(step_s=2.0)),
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.rules) == (1, ("rank-stuck",))
    said = "it waits in the second at F1.0 (the host reads the loss)"
    assert said in outcome.failure.fault.summary
