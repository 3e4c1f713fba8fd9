"""What `ec.threaded` is asked for: places that are there, a dim, and names of arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.parallel.threads.module import devices_of

CPU = torch.device("cpu")


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


def test_places_are_counted_or_listed() -> None:
    assert devices_of(nn.Linear(2, 2), 3, None) == [CPU] * 3
    assert devices_of(nn.Identity(), 1, None) == [CPU]
    assert devices_of(nn.Linear(2, 2), None, ["cpu", CPU, "cpu:0"]) == [CPU] * 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "neither is said"),
        ({"replicas": 2, "devices": ["cpu"]}, "both are said"),
        ({"replicas": 0}, "replicas = 0"),
        ({"replicas": -1}, "replicas = -1"),
        ({"replicas": 2.0}, "replicas = 2.0"),
        ({"replicas": True}, "replicas = True"),
        ({"devices": []}, "devices = [] is no list"),
        ({"devices": "cpu"}, "'cpu' is no list"),
        ({"devices": ["cpu", "cuda:0"]}, "of 2 types (cpu, cuda)"),
        ({"devices": ["cpu", "quantum"]}, "'quantum' is no device"),
        ({"devices": ["cpu", None]}, "None is no device"),
        ({"devices": ["meta", "meta"]}, "of the type meta"),
        ({"devices": ["cuda:98", 99]}, "cuda:98, cuda:99: this host has"),
        ({"devices": ["cuda:99", "cuda:99"]}, "cuda:99 twice"),
        ({"replicas": 2, "dim": -1}, "dim = -1"),
        ({"replicas": 2, "dim": "0"}, "dim = '0'"),
        ({"replicas": 2, "whole": "mask"}, "no list of names"),
        ({"replicas": 2, "whole": ["musk"]}, "'musk', which is no argument of Masked.forward"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ec.ConfigError) as caught:
        ec.threaded(Masked(), **arguments)
    assert set(caught.value.rules) == {"threaded-argument"}
    assert told in str(caught.value)


def test_whole_names_any_argument_where_the_forward_takes_any() -> None:
    class Open(nn.Module):
        def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
            return x + others["table"].sum()

    out = ec.threaded(Open(), replicas=2, whole=["table"])(torch.zeros(4), table=torch.ones(3))
    assert out.tolist() == [3] * 4
