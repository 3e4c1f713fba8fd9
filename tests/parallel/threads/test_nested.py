"""Arguments in tuples and dicts are cut; outputs in them are joined; what is neither is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.parallel.threads.copies import Arguments, read_arguments, read_outputs

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Holder:
    inside: Any


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: object) -> None:
        self.inside = inside


def read(*args: Any, whole: tuple[str, ...] = (), dim: int = 0, **kwargs: Any) -> Arguments:
    return read_arguments(args, kwargs, names=["x", "y"], whole=whole, dim=dim, replicas=2)


def given(arguments: Arguments, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    places = range(len(arguments.leaves))
    return arguments.of_replica([arguments.part(place, index) for place in places])


def rows(count: int, width: int = 2) -> torch.Tensor:
    return torch.arange(count * width).view(count, width)


def test_tensors_are_cut_in_whatever_they_are() -> None:
    note = object()
    found = read(
        rows(5),
        [rows(5), {"a": (rows(5), 3)}],
        pair=Pair(rows(5), None),
        note=note,
        n=torch.ones(()),
    )
    assert found.rows == (3, 2)
    args, kwargs = given(found, 1)
    for one in (args[0], args[1][0], args[1][1]["a"][0], kwargs["pair"].left):
        assert one.tolist() == [[6, 7], [8, 9]]
    assert (args[1][1]["a"][1], kwargs["pair"].right) == (3, None)
    assert isinstance(kwargs["pair"], Pair)
    assert kwargs["note"] is note
    assert kwargs["n"] == 1
    assert found.bytes_elsewhere == 4 * 2 * 2 * 8 + 4


def test_what_is_whole_goes_to_all_as_it_is_and_by_place_or_name() -> None:
    table, held = rows(7), Holder(rows(3))
    args, kwargs = given(read(rows(4), table, mask=held, whole=("y", "mask")), 1)
    assert args[1] is table
    assert kwargs["mask"] is held


def test_another_dim_is_cut() -> None:
    args, _ = given(read(rows(2, 3), dim=1), 1)
    assert args[0].tolist() == [[2], [5]]
    assert args[0].is_contiguous()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: read(rows(4), rows(6)), "along dim 0 x has 4, y has 6"),
        (lambda: read(rows(4), mask=[rows(4), rows(3)]), "mask[1] has 3"),
        (lambda: read(rows(4), torch.ones(4), dim=1), "dim = 1, but y has 1 dims"),
        (lambda: read(rows(4), rows(4), rows(2)), "args[2] has 2"),
        (lambda: read(rows(4), UserDict(a=rows(4))), "y is a UserDict with tensors"),
        (lambda: read(rows(4), state=Holder([rows(4)])), "state is a Holder with tensors"),
        (lambda: read(rows(4), state=Slotted(Holder(rows(4)))), "state is a Slotted with tensors"),
        (lambda: read(rows(4), state=(1, {torch.ones(2)})), "state[1] is a set with tensors"),
    ],
)
def test_a_batch_that_cannot_be_cut(call: Callable[[], Arguments], told: str) -> None:
    with pytest.raises(ec.ConfigError) as caught:
        call()
    assert caught.value.rules == ("threaded-batch",)
    assert told in str(caught.value)


def test_outputs_are_joined_in_whatever_they_are() -> None:
    parts = [
        OrderedDict(a=rows(count), b=(torch.tensor(count), Pair("same", [rows(count)])))
        for count in (3, 1)
    ]
    found = read_outputs(parts, 0)
    joined = [found.joined(place, CPU) for place in found.tensors]
    out = found.of_all(joined)
    assert isinstance(out, OrderedDict)
    assert out["a"].tolist() == [*rows(3).tolist(), *rows(1).tolist()]
    assert out["b"][0].tolist() == [3, 1]
    assert out["b"][1].left == "same"
    assert out["b"][1].right[0].shape == (4, 2)
    first = found.tensors[0]
    assert [part.shape[0] for part in found.cut(first, joined[0])] == [3, 1]
    assert [part.item() for part in found.cut(found.tensors[1], joined[1])] == [3, 1]


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ([rows(2), rows(2, 3)], "output has the shapes (2, 2), (2, 3)"),
        ([(rows(2), 1.5), (rows(2), 2.5)], "output[1] is 1.5, 2.5 on the replicas"),
        ([{"a": rows(2)}, {"b": rows(2)}], "replica 1 returns"),
        ([{"a": rows(2)}, {"a": None}], "output['a'] is Tensor, NoneType"),
        ([Holder(1), Holder(1)], "output is a Holder on each replica"),
        ([torch.ones(()), torch.ones(2)], "output has the shapes (), (2,)"),
    ],
)
def test_outputs_that_cannot_be_joined(outputs: list[Any], told: str) -> None:
    with pytest.raises(ec.ConfigError) as caught:
        read_outputs(outputs, 0)
    assert caught.value.rules == ("threaded-output",)
    assert told in str(caught.value)
