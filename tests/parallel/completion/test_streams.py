"""Streams side by side: two accesses that no wait orders are named, whichever comes first here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.parallel.completion.in_flight import InFlight, Race, RaceKind
from echelon.parallel.completion.late import InFlightWatch
from echelon.parallel.completion.late_memory import LateCopyStreams, LateFileOffloadStore
from echelon.parallel.completion.streams import COMPUTE, HOST, Access, StreamOrder, StreamWork
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.file_store import FileFetch, FileOffloadStore, FileTransfer
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.recompute import HostActivations

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch


def order_and_pairs() -> tuple[StreamOrder, list[tuple[str, str]]]:
    pairs: list[tuple[str, str]] = []

    def tell(earlier: Access, later: Access) -> None:
        pairs.append((earlier.work.by, later.work.by))

    return StreamOrder(tell), pairs


def test_streams_know_each_other_by_events_only() -> None:
    order, pairs = order_and_pairs()
    x, y = torch.zeros(4), torch.zeros(4)
    for tensor in (x, y):
        order.uses(COMPUTE, tensor, StreamWork(by="mm"), writes=True)
    order.give("down", order.moment(COMPUTE))
    order.uses("down", x, StreamWork(by="copy x"), writes=False)
    assert pairs == []
    order.uses("up", y, StreamWork(by="copy y"), writes=False)
    assert pairs == [("mm", "copy y")]
    order.uses(COMPUTE, x, StreamWork(by="add_"), writes=True)
    assert pairs[1:] == [("copy x", "add_")]


def test_the_host_passes_on_what_it_has_waited_for() -> None:
    order, pairs = order_and_pairs()
    x = torch.zeros(4)
    order.uses("down", x, StreamWork(by="copy x"), writes=True)
    order.wait(HOST, order.moment("down"))
    order.give("file")
    order.uses("file", x, StreamWork(by="write x"), writes=False)
    order.uses(COMPUTE, x, StreamWork(by="add_"), writes=True)
    assert pairs == [("write x", "add_")]


def test_two_reads_and_two_parts_need_no_order() -> None:
    order, pairs = order_and_pairs()
    x = torch.zeros(4)
    order.uses("a", x[:2], StreamWork(by="first"), writes=True)
    order.uses("b", x[2:], StreamWork(by="second"), writes=True)
    y = torch.zeros(4)
    order.uses("a", y, StreamWork(by="first"), writes=False)
    order.uses("b", y, StreamWork(by="second"), writes=False)
    assert pairs == []
    order.uses("b", x[1:3], StreamWork(by="third"), writes=False)
    assert pairs == [("first", "third")]


def test_a_storage_that_ends_leaves_nothing_to_the_next_one_at_its_address() -> None:
    order, pairs = order_and_pairs()
    for _ in range(20):
        order.uses("a", torch.zeros(1000), StreamWork(by="first"), writes=True)
        order.uses("b", torch.zeros(1000), StreamWork(by="second"), writes=True)
    assert pairs == []


def test_accesses_of_a_stream_are_forgotten() -> None:
    order, pairs = order_and_pairs()
    x = torch.zeros(4)
    order.uses("file", x, StreamWork(by="read a"), writes=True)
    order.forget("file")
    order.uses(COMPUTE, x, StreamWork(by="add_"), writes=True)
    assert pairs == []


def test_a_thread_runs_work_of_a_stream() -> None:
    order, _ = order_and_pairs()
    with order.on("file"):
        assert order.here == "file"
    assert order.here == HOST


@pytest.fixture
def races() -> list[Race]:
    """Return the races that the rank of a test has told."""
    return []


@pytest.fixture
def flight(races: list[Race]) -> Iterator[InFlight]:
    """Return a ledger that watches the test."""
    flight = InFlight(0, 0, races.append)
    with InFlightWatch(flight):
        yield flight


def store_in(flight: InFlight, folder: Path | None, num_buffers: int = 2) -> CopyingOffloadStore:
    streams = LateCopyStreams(flight, "slices")
    side: Any = MemoryOffloadStore("host")
    if folder is not None:
        side = LateFileOffloadStore(folder, 0, num_buffers, flight, settle=streams.settle)
    store = CopyingOffloadStore(side, CPU, streams, num_buffers=num_buffers)
    for key in ("a", "b", "c"):
        store.add(key, 3, torch.float32)
    return store


def update(store: CopyingOffloadStore, rounds: int = 3) -> list[list[float]]:
    """Update each key in turn, the next one being fetched ahead, as optimizers do."""
    keys = ("a", "b", "c") * rounds
    ahead = store.fetch([keys[0]])
    for place, key in enumerate(keys):
        fetched, ahead = ahead, store.fetch([keys[(place + 1) % len(keys)]])
        (tensor,) = fetched.wait()
        store.put([key], [tensor.add_(1.0)])
    ahead.wait()
    ahead.release()
    store.flush()
    contents = [store.view(key).tolist() for key in ("a", "b", "c")]
    store.close()
    return contents


def activations(flight: InFlight) -> None:
    """Keep the inputs of three blocks on the host, twice."""
    host = HostActivations(lambda _: LateCopyStreams(flight, "activations"))
    for _ in range(2):
        forward_pass, x = object(), torch.ones(4)
        stored = []
        for _ in range(3):
            x = x * 2
            stored.append(host.store(x, forward_pass))
        for held in stored[::-1]:
            held.take().mul(3)


@pytest.mark.parametrize("in_files", [False, True])
def test_updates_of_offloaded_slices_are_ordered(
    in_files: bool, flight: InFlight, races: list[Race], tmp_path: Path
) -> None:
    assert update(store_in(flight, tmp_path if in_files else None)) == [[3.0] * 3] * 3
    assert not races


def test_activations_on_the_host_are_ordered(flight: InFlight, races: list[Race]) -> None:
    activations(flight)
    assert not races


def without_marks(direction: str) -> Callable[[Patch], None]:
    """Let copies of a direction wait for no stream."""

    def mutate(patch: Patch) -> None:
        copy = LateCopyStreams.copy

        def early(self: LateCopyStreams, way: Any, copies: Any, after: Any) -> Any:
            return copy(self, way, copies, [] if way == direction else after)

        patch.setattr(LateCopyStreams, "copy", early)

    return mutate


def event_recorded_too_early(patch: Patch) -> None:
    """Let every event be the one before."""
    record, before = LateCopyStreams.record_event, list[Any]()

    def early(self: LateCopyStreams) -> Any:
        before.append(record(self))
        return before[max(0, len(before) - 2)]

    patch.setattr(LateCopyStreams, "record_event", early)


def write_before_the_copy_down(patch: Patch) -> None:
    write = FileOffloadStore._write
    patch.setattr(FileOffloadStore, "_write", lambda self, t, _: write(self, t, lambda: None))


def read_before_the_write(patch: Patch) -> None:
    transfers = FileOffloadStore._transfers_of

    def unordered(self: FileOffloadStore, place: Any, part: Any) -> Iterator[FileTransfer]:
        for transfer in transfers(self, place, part):
            yield FileTransfer(
                key=transfer.key, memory=transfer.memory, start=transfer.start, after=None
            )

    patch.setattr(FileOffloadStore, "_transfers_of", unordered)


def use_before_the_copy_up(patch: Patch) -> None:
    patch.setattr(LateCopyStreams, "wait_for", lambda self, mark: None)


def copy_up_before_the_read(patch: Patch) -> None:
    def unwaited(self: LateFileOffloadStore, fetched: FileFetch) -> list[torch.Tensor]:
        return FileOffloadStore.wait_for(self, fetched)

    patch.setattr(LateFileOffloadStore, "wait_for", unwaited)


OF_SLICES = [
    (without_marks("down"), False, {"copy down slices"}),
    (without_marks("down"), True, {"copy down slices"}),
    (without_marks("up"), False, {"copy up slices", "copy down slices"}),
    (event_recorded_too_early, False, {"copy down slices"}),
    (event_recorded_too_early, True, {"copy down slices"}),
    (use_before_the_copy_up, False, {"copy up slices"}),
    (write_before_the_copy_down, True, {"copy down slices", "write a", "write b", "write c"}),
    (copy_up_before_the_read, True, {"read a", "read b", "read c"}),
]


@pytest.mark.parametrize(("mutate", "in_files", "names"), OF_SLICES)
def test_a_missing_wait_around_slices_is_named(  # noqa: PLR0917
    mutate: Callable[[Patch], None],
    in_files: bool,
    names: set[str],
    flight: InFlight,
    races: list[Race],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    mutate(monkeypatch)
    update(store_in(flight, tmp_path if in_files else None))
    assert races
    assert {race.operation for race in races} & names, races


def test_a_read_before_the_write_of_its_key_is_named(
    flight: InFlight, races: list[Race], tmp_path: Path, monkeypatch: Patch
) -> None:
    def again(store: CopyingOffloadStore) -> None:
        for _ in range(3):
            (tensor,) = store.fetch(["a"]).wait()
            store.put(["a"], [tensor.add_(1.0)])
        store.close()

    again(store_in(flight, tmp_path))
    assert not races
    read_before_the_write(monkeypatch)
    again(store_in(flight, tmp_path))
    assert {race.operation for race in races} <= {"read a", "write a"}
    assert "read a reads on stream" in races[0].says
    assert "write a writes on stream" in races[0].says


def test_a_pair_names_both_accesses_and_their_streams(
    flight: InFlight, races: list[Race], monkeypatch: Patch
) -> None:
    without_marks("down")(monkeypatch)
    update(store_in(flight, None), rounds=1)
    race = next(race for race in races if race.kind is RaceKind.UNORDERED)
    assert race.operation == "copy down slices"
    assert race.axis == "host"
    earlier, later = race.says.partition(": ")[2].split("; ")
    assert earlier.startswith("add_ writes on stream compute at ")
    assert later.startswith("copy down slices reads on stream slices down at ")
    assert "test_streams.py" in earlier


@pytest.mark.parametrize(
    ("mutate", "names"),
    [
        (without_marks("down"), {"copy down activations"}),
        (without_marks("up"), {"copy up activations", "copy down activations"}),
        (event_recorded_too_early, {"copy down activations"}),
        (use_before_the_copy_up, {"copy up activations"}),
    ],
)
def test_a_missing_wait_around_activations_is_named(
    mutate: Callable[[Patch], None],
    names: set[str],
    flight: InFlight,
    races: list[Race],
    monkeypatch: Patch,
) -> None:
    mutate(monkeypatch)
    activations(flight)
    assert {race.operation for race in races} & names, races
    assert all(race.operation in names for race in races), races


def test_a_buffer_of_the_host_that_is_reused_too_early_is_named(
    flight: InFlight, races: list[Race], tmp_path: Path, monkeypatch: Patch
) -> None:
    """The host does not wait for the copy up: threads read the next set into its source."""
    monkeypatch.setattr("echelon.parallel.completion.late_memory.LateMark.synchronize", _nothing)
    store = store_in(flight, tmp_path, num_buffers=1)
    for key in ("a", "b"):
        fetched = store.fetch([key])
        fetched.wait()
        fetched.release()
    assert {race.operation for race in races} & {"copy up slices", "read b"}, races


def _nothing(mark: object) -> None:
    del mark
