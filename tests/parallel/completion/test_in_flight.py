"""The ledger tells of each thing that is done too early, once, by the name of the operation."""

from __future__ import annotations

import torch

from echelon.parallel.completion.in_flight import (
    InFlight,
    LateOperation,
    OperationName,
    Race,
    RaceKind,
    place_in_code,
)

SUM = OperationName(kind="all_reduce", name="x", axis="dp")


def ledger() -> tuple[InFlight, list[Race]]:
    races: list[Race] = []
    return InFlight(3, 0, races.append), races


def copying(
    flight: InFlight, target: torch.Tensor, source: torch.Tensor, kind: str = "copy"
) -> LateOperation:
    """Begin an operation that copies."""
    copy = source.clone()
    name = OperationName(kind=kind, name="x", axis="dp")
    return flight.begin(name, lambda: None, reads=[(source, copy)], writes=[(target, copy)])


def told(races: list[Race]) -> list[tuple[RaceKind, str, str]]:
    return [(race.kind, race.operation, race.axis) for race in races]


def test_a_result_is_poison_until_it_is_awaited() -> None:
    flight, races = ledger()
    target, source = torch.zeros(3), torch.ones(3)
    operation = copying(flight, target, source)
    assert target.isnan().all()
    flight.land(operation)
    flight.land(operation)
    assert target.tolist() == [1.0] * 3
    assert not races
    assert flight.num_operations == 1


def test_a_gather_in_place_keeps_its_own_part() -> None:
    flight, races = ledger()
    whole = torch.arange(4.0)
    operation = flight.begin(
        OperationName(kind="all_gather", name="x", axis="dp"),
        lambda: None,
        reads=[(whole[:2], whole[:2].clone())],
        writes=[(whole, torch.tensor([0.0, 1.0, 7.0, 8.0]))],
    )
    assert whole[:2].tolist() == [0.0, 1.0]
    assert whole[2:].isnan().all()
    flight.land(operation)
    assert whole.tolist() == [0.0, 1.0, 7.0, 8.0]
    assert not races


def test_an_input_that_changes_is_told() -> None:
    flight, races = ledger()
    target, source = torch.zeros(3), torch.ones(3)
    operation = copying(flight, target, source)
    source[1] = 2.0
    flight.land(operation)
    assert told(races) == [(RaceKind.CHANGED, "copy x", "dp")]
    assert "its input [3] is not what it was" in races[0].says
    assert races[0].rank == 3
    assert "test_in_flight.py" in races[0].at


def test_a_result_that_somebody_else_writes_is_told() -> None:
    flight, races = ledger()
    target = torch.zeros(3)
    operation = copying(flight, target, torch.ones(3))
    target.zero_()
    flight.land(operation)
    assert told(races) == [(RaceKind.CHANGED, "copy x", "dp")]
    assert target.tolist() == [1.0] * 3


def test_two_operations_that_fill_the_same_memory_are_told() -> None:
    flight, races = ledger()
    target = torch.zeros(3)
    copying(flight, target, torch.ones(3))
    copying(flight, target, torch.ones(3), kind="send")
    assert told(races) == [(RaceKind.CHANGED, "copy x", "dp")]
    assert "overwritten by send x" in races[0].says


def test_what_is_used_too_early_is_told_once() -> None:
    flight, races = ledger()
    target = torch.zeros(3)
    copying(flight, target, torch.ones(3))
    for _ in range(2):
        flight.use(target, by="mm", writes=False, reads=True)
    flight.use(torch.zeros(3), by="mm", writes=True, reads=True)
    assert told(races) == [(RaceKind.USED, "copy x", "dp")]


def test_an_operation_may_end_in_the_next_step_and_no_later() -> None:
    flight, races = ledger()
    copying(flight, torch.zeros(3), torch.ones(3))
    flight.end_step()
    assert not races
    flight.end_step()
    assert told(races) == [(RaceKind.NEVER_AWAITED, "copy x", "dp")]
    assert races[0].step == 0


def test_memory_that_is_freed_in_flight_is_told_and_left_alone() -> None:
    flight, races = ledger()
    memory = torch.zeros(12, dtype=torch.uint8)
    operation = copying(flight, memory.view(torch.float32), torch.ones(3))
    flight.free(memory)
    flight.lend(memory)
    memory.zero_()
    flight.land(operation)
    assert told(races) == [(RaceKind.FREED, "copy x", "dp")]
    assert not memory.any()


def test_free_memory_is_poison_and_known_by_what_was_in_it() -> None:
    flight, races = ledger()
    memory = torch.zeros(12, dtype=torch.uint8)
    values = memory.view(torch.float32)
    flight.land(copying(flight, values, torch.ones(3)))
    assert flight.free(memory)
    assert values.isnan().all()
    flight.use(values, by="mm", writes=False, reads=True)
    assert not flight.free(memory)
    assert told(races) == [
        (RaceKind.USED_FREED, "copy x", "dp"),
        (RaceKind.FREED_TWICE, "copy x", "dp"),
    ]
    flight.lend(memory)
    flight.use(values, by="add", writes=True, reads=True)
    assert len(races) == 2


def test_who_observes_sees_results_and_waits_for_nobody() -> None:
    flight, races = ledger()
    target = torch.zeros(3)
    operation = copying(flight, target, torch.ones(3))
    with flight.observing():
        flight.land(operation)
        assert target.tolist() == [1.0] * 3
    assert target.isnan().all()
    flight.end_step()
    flight.end_step()
    assert told(races) == [(RaceKind.NEVER_AWAITED, "copy x", "dp")]


def test_what_is_left_is_ended_without_a_word() -> None:
    flight, races = ledger()
    ended: list[int] = []
    flight.begin(SUM, lambda: ended.append(1), writes=[(torch.zeros(1), torch.ones(1))])
    flight.close()
    assert ended == [1]
    assert not races


def test_a_race_is_a_line_of_a_file() -> None:
    race = Race(
        kind=RaceKind.USED,
        operation="all_reduce x",
        axis="dp",
        step=1,
        rank=0,
        at=place_in_code(),
        says="its result is used by mm",
        when_s=2.5,
    )
    assert Race.from_json(race.to_json()) == race
    assert "test_in_flight.py" in race.at
