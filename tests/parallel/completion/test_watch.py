"""Operations of torch that touch elements of memory in flight are seen, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.parallel.completion.in_flight import InFlight, OperationName
from echelon.parallel.completion.race import Race, RaceKind
from echelon.parallel.completion.watch import InFlightWatch

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
    assert "test_watch.py" in race.at


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
