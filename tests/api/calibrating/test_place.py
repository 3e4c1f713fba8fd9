"""What is measured with: this machine, or the ranks of a launch, whose nodes must be alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.api.calibrating.place import (
    place_here,
    place_of_launch,
    require_ranks_of_launch,
)
from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.launch.launched.jobs import RankPlace


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def _ranks(*nodes: int, device: str = "cpu") -> list[RankPlace]:
    return [
        RankPlace(host=f"node-{node}", local_rank=rank, node_size=size, device=device)
        for node, size in enumerate(nodes)
        for rank in range(size)
    ]


@pytest.mark.usefixtures("no_gpu")
def test_ranks_of_a_launch_are_those_of_their_nodes() -> None:
    place = place_of_launch(_ranks(2, 2, 2))
    assert (place.ranks, place.nodes, place.backend) == (2, 3, "gloo")
    assert place.hosts == ("node-0", "node-1", "node-2")
    assert place.facts(0.5)["hosts"] == place.hosts
    alone = place_of_launch(_ranks(2))
    assert replace(alone, hosts=()) == place_here(2)


@pytest.mark.usefixtures("no_gpu")
def test_what_measurements_of_a_machine_have_in_common() -> None:
    facts = place_here(2).facts(0.5)
    assert facts == place_here(2).facts(0.5)
    other = place_here(1).facts(0.25)
    assert {name for name in facts if facts[name] != other[name]} >= {"ranks", "window_s"}


@pytest.mark.parametrize("nodes", [(2, 1), (1, 2), (3, 2, 1)])
def test_nodes_of_other_sizes_are_told(nodes: tuple[int, ...]) -> None:
    with pytest.raises(EnvironmentProblem, match="on its node") as caught:
        place_of_launch(_ranks(*nodes))
    assert caught.value.rules == ("ranks-to-calibrate",)


def test_ranks_that_lie_otherwise_are_told() -> None:
    with pytest.raises(EnvironmentProblem, match="rank 0 is rank 1 of 2"):
        place_of_launch(_ranks(2, 2)[::-1])


def test_nodes_with_other_devices_are_told() -> None:
    ranks = [*_ranks(2, device="H100"), *_ranks(2, device="A100")]
    with pytest.raises(EnvironmentProblem, match="2 ranks on H100, 2 ranks on A100") as caught:
        place_of_launch(ranks)
    assert caught.value.rules == ("calibration-same-device",)


def test_other_ranks_than_torchrun_started_are_told() -> None:
    require_ranks_of_launch(None, 4)
    require_ranks_of_launch(4, 4)
    with pytest.raises(ConfigError, match="torchrun started 4 ranks") as caught:
        require_ranks_of_launch(2, 4)
    assert caught.value.rules == ("ranks-to-calibrate",)


def test_a_gpu_that_is_known_has_a_vendors_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        major=9,
        minor=0,
        name="NVIDIA H100 80GB HBM3",
        total_memory=85_000_000_000,
        multi_processor_count=132,
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    place = place_here(None)
    assert (place.ranks, place.backend, place.dtype) == (8, "nccl", "bf16")
    assert (place.machine.units, place.machine.asynchronous) == (132, True)
    assert place.machine.peak_flops == pytest.approx(989e12, rel=0.01)
    assert place.machine.capability == 9.0
    with pytest.raises(ConfigError, match="1 to 8 GPUs"):
        place_here(9)
    old: Any = SimpleNamespace(**{**vars(properties), "major": 7, "name": "unheard of"})
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: old)
    assert place_here(1).machine.peak_flops is None
    assert place_here(1).dtype == "fp16"
