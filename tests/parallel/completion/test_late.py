"""The late policy makes late parts, watches steps, and writes down what it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import OffloadTarget
from echelon.parallel.completion.in_flight import InFlight, OperationName, Race, RaceKind
from echelon.parallel.completion.late import InFlightWatch, LateCompletion, LateGroup
from echelon.parallel.completion.late_memory import (
    LateBufferPool,
    LateCopyStreams,
)
from echelon.parallel.offload import OffloadPlace
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "mm": lambda x: x @ x,
    "cat": lambda x: torch.cat([torch.zeros(2, 2), x]),
    "add_": lambda x: x.add_(1),
    "row": lambda x: x[1].clone(),
}
NO_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda x: x.view(4)[1:].detach(),
    "empty_like": lambda x: torch.empty_like(x).zero_(),
    "zeros_like": lambda x: torch.zeros_like(x).add_(1),
    "new_empty": lambda x: x.new_empty(3).fill_(1.0),
    "split": lambda x: x.split(1),
    "numel": lambda x: x.numel() + x.stride(0),
}
OVERWRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones(2, 2)),
    "out": lambda x: torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=x),
}


@pytest.fixture
def late(tmp_path: Path) -> LateCompletion:
    """Return the policy of rank 1."""
    return LateCompletion(1, 0, tmp_path / "races")


STORES: dict[OffloadTarget, type] = {
    "none": MemoryOffloadStore,
    "host": CopyingOffloadStore,
    "nvme": CopyingOffloadStore,
}


@pytest.mark.parametrize("home", STORES)
def test_slices_rest_where_the_plan_says(
    late: LateCompletion, home: OffloadTarget, tmp_path: Path
) -> None:
    place = OffloadPlace(target=home, folder=tmp_path, rank=1, num_buffers=2)
    store = late.offload_store(place, CPU)
    assert type(store) is STORES[home]
    store.add("a", 3, torch.float32)
    store.put(["a"], [torch.ones(3)])
    (tensor,) = store.fetch(["a"]).wait()
    assert tensor.tolist() == [1.0] * 3
    store.put(["a"], [tensor.mul_(2.0)])
    assert store.view("a").tolist() == [2.0] * 3
    store.close()
    assert not (tmp_path / "races").read_text()


def test_all_that_starts_operations_is_late(late: LateCompletion) -> None:
    assert type(late.group("tp", (1,), None, Recorder(1, NoEvents()))) is LateGroup
    assert type(late.buffer_pool(CPU)) is LateBufferPool
    assert type(late.copy_streams(CPU)) is LateCopyStreams


def test_a_race_is_written_down_at_once(late: LateCompletion, tmp_path: Path) -> None:
    result = torch.zeros(2)
    flight = late._flight
    name = OperationName(kind="all_reduce", name="x", axis="dp")
    operation = flight.begin(name, lambda: None, writes=[(result, torch.ones(2))])
    with late.watching():
        result.sum()
        (line,) = (tmp_path / "races").read_text().splitlines()
    race = Race.from_json(line)
    assert (race.kind, race.operation, race.rank) == (RaceKind.USED, "all_reduce x", 1)
    with late.observing():
        flight.land(operation)
        assert result.tolist() == [1.0, 1.0]
    assert result.isnan().all()
    assert late.num_operations == 1
    late.close()


def races_of(use: Callable[[torch.Tensor], object]) -> list[Race]:
    """Return what is told where `use` is given the result of an operation in flight."""
    races: list[Race] = []
    flight = InFlight(0, 0, races.append)
    result = torch.zeros(2, 2)
    name = OperationName(kind="all_reduce", name="x", axis="dp")
    flight.begin(name, lambda: None, writes=[(result, torch.ones(2, 2))])
    with InFlightWatch(flight):
        use(result)
    return races


@pytest.mark.parametrize("use", READS.values())
def test_who_reads_a_result_too_early_is_told(use: Callable[[torch.Tensor], object]) -> None:
    (race,) = races_of(use)
    assert (race.kind, race.operation) == (RaceKind.USED, "all_reduce x")
    assert "test_late.py" in race.at


@pytest.mark.parametrize("use", NO_READS.values())
def test_shapes_and_views_may_be_taken(use: Callable[[torch.Tensor], object]) -> None:
    assert not races_of(use)


@pytest.mark.parametrize("use", OVERWRITES.values())
def test_who_overwrites_a_result_is_told(use: Callable[[torch.Tensor], object]) -> None:
    (race,) = races_of(use)
    assert race.kind is RaceKind.CHANGED


def test_lists_and_fused_updates_are_looked_into() -> None:
    def update(x: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = x
        torch.optim.SGD([parameter], 0.1, fused=True).step()

    (race,) = races_of(update)
    assert race.says == "its result is used by _fused_sgd_"


def test_who_writes_an_input_in_flight_is_told_and_who_reads_it_is_not() -> None:
    races: list[Race] = []
    flight = InFlight(0, 0, races.append)
    sent = torch.ones(2)
    name = OperationName(kind="send", name="x", axis="pp")
    flight.begin(name, lambda: None, reads=[(sent, sent.clone())])
    with InFlightWatch(flight):
        sent.sum()
        assert not races
        sent.mul_(2.0)
    assert [race.says for race in races] == ["its input is changed by mul_"]
