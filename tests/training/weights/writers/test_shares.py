"""Who writes what, and how much threads hold together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Barrier, Lock, Thread
from typing import Any

import pytest

from echelon.core.errors import CheckpointError, EchelonError
from echelon.core.rulebook.run import CHECKPOINT_UNDAMAGED
from echelon.training.weights.export import SCRATCH_BYTES
from echelon.training.weights.writers.shares import (
    SLACK_BYTES,
    FolderPart,
    TensorRoom,
    Writers,
    shared_out,
)

MB = 2**20


def part(
    name: str, size: int, file: str = "", write: Callable[[TensorRoom], Any] = str
) -> FolderPart:
    return FolderPart(name=name, file=file or name, num_bytes=size, largest=size, write=write)


class Ranks:
    """Ranks on threads, each of which sees the others as processes do."""

    def __init__(self, size: int) -> None:
        self._barrier, self._values = Barrier(size), [None] * size
        self.size = size

    def of(self, index: int) -> Any:
        outer = self

        class One:
            size = outer.size

            def gather_objects(self, value: Any) -> list[Any]:
                outer._values[index] = value
                outer._barrier.wait()
                found = list(outer._values)
                outer._barrier.wait()
                return found

        one: Any = One()
        one.index = index
        return one


def on_ranks(size: int, work: Callable[[Writers], Any]) -> list[Any]:
    """Return what each rank returned, or the error that it raised."""
    ranks, found = Ranks(size), [None] * size

    def run(index: int) -> None:
        try:
            found[index] = work(Writers(2, ranks.of(index)))
        except EchelonError as error:
            found[index] = error  # type: ignore[call-overload]

    threads = [Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def names(shares: Sequence[Sequence[FolderPart]]) -> list[list[str]]:
    return [[one.name for one in share] for share in shares]


def test_files_are_shared_out_whole_by_their_bytes() -> None:
    parts = [part("a", 5, "x"), part("b", 4, "x"), part("c", 6, "y"), part("d", 2, "z")]
    assert names(shared_out(parts, 2)) == [["a", "b"], ["c", "d"]]
    # Fewer files than ranks: ranks write into the same file.
    assert names(shared_out(parts, 4)) == [["c"], ["a"], ["b"], ["d"]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_part_is_written_once_and_all_hear_of_it(ranks: int) -> None:
    written: list[str] = []
    lock = Lock()

    def make(name: str) -> FolderPart:
        def write(room: TensorRoom) -> str:
            with room.hold(1), lock:
                written.append(name)
            return name.upper()

        return part(name, len(name), write=write)

    parts = [make(name) for name in ("a", "bb", "ccc", "dd")]
    found = on_ranks(ranks, lambda writers: writers.write(parts))
    assert sorted(written) == sorted(one.name for one in parts)
    assert found == [{"a": "A", "bb": "BB", "ccc": "CCC", "dd": "DD"}] * ranks
    assert list(found[0]) == ["a", "bb", "ccc", "dd"]


def test_an_error_says_of_which_rank_it_is_on_all_of_them() -> None:
    def fail(_: TensorRoom) -> None:
        raise CheckpointError(CHECKPOINT_UNDAMAGED.problem("a.bin cannot be read"))

    parts = [part("a", 3), part("b", 2, write=fail)]
    for error in on_ranks(2, lambda writers: writers.write(parts)):
        assert isinstance(error, CheckpointError)
        assert error.rules == ("checkpoint-undamaged",)
        assert "rank 1: a.bin cannot be read" in str(error)


def test_what_the_first_rank_does_alone_is_told_to_all() -> None:
    assert on_ranks(3, lambda writers: writers.on_first(lambda: writers.exchange.index)) == [0] * 3


def test_threads_hold_no_more_than_the_largest_tensor_and_some_small_ones() -> None:
    held, most, lock = [0], [0], Lock()
    sizes = [100 * MB, 60 * MB, 30 * MB, *(MB for _ in range(20))]

    def make(place: int, size: int) -> FolderPart:
        def write(room: TensorRoom) -> None:
            with room.hold(size):
                with lock:
                    held[0] += size + SCRATCH_BYTES
                    most[0] = max(most[0], held[0])
                time.sleep(0.002)
                with lock:
                    held[0] -= size + SCRATCH_BYTES

        return part(str(place), size, write=write)

    Writers(8).write([make(place, size) for place, size in enumerate(sizes)])
    assert 100 * MB < most[0] <= 100 * MB + SLACK_BYTES
