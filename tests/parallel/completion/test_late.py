"""The late policy makes late parts, watches steps, and writes down what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import OffloadTarget
from echelon.parallel.completion.in_flight import OperationName
from echelon.parallel.completion.late import LateCompletion
from echelon.parallel.completion.late_copies import LateCopyStreams
from echelon.parallel.completion.late_files import LateFileOffloadStore
from echelon.parallel.completion.late_group import LateGroup
from echelon.parallel.completion.late_memory import LateBufferPool
from echelon.parallel.completion.race import Race, RaceKind
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")


@pytest.fixture
def late(tmp_path: Path) -> LateCompletion:
    """Return the policy of rank 1."""
    return LateCompletion(1, 0, tmp_path / "races")


STORES: dict[OffloadTarget, type] = {
    "none": MemoryOffloadStore,
    "host": CopyingOffloadStore,
    "nvme": LateFileOffloadStore,
}


@pytest.mark.parametrize("home", STORES)
def test_slices_rest_where_the_plan_says(
    late: LateCompletion, home: OffloadTarget, tmp_path: Path
) -> None:
    store = late.offload_store(home, CPU, folder=tmp_path, rank=1, num_buffers=2)
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
