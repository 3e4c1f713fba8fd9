"""What launching reads from the environment, and what it says when that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import EnvironmentProblem
from echelon.launch import environment
from echelon.launch.environment import (
    VARIABLES,
    LaunchedRank,
    check_world_size,
    is_launched,
    local_environment,
    rank_environment,
    read_launched_rank,
    read_node_size,
    wanted_port,
    zero_stage_asked_of_accelerate,
)
from echelon.launch.gpus import dump_environment

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_place_is_read_as_torchrun_writes_it() -> None:
    assert read_launched_rank(TORCHRUN) == LaunchedRank(
        rank=5,
        local_rank=1,
        world_size=8,
        master_addr="node-0",
        master_port=29500,
        attempt="abc/2",
        store_is_hosted=True,
    )
    assert is_launched(TORCHRUN)
    assert not is_launched({})
    assert not is_launched({"MASTER_PORT": "29500"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launch_is_no_run_of_its_own(name: str) -> None:
    half = {name: TORCHRUN[name]}
    assert is_launched(half)
    with pytest.raises(EnvironmentProblem, match="MASTER_ADDR, MASTER_PORT not set"):
        read_launched_rank(half)


def test_missing_variables_are_named() -> None:
    with pytest.raises(EnvironmentProblem, match="LOCAL_RANK, MASTER_PORT not set") as caught:
        read_launched_rank({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    assert caught.value.rules == ("rank-environment",)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "8", "RANK = 8 is not a whole number from 0 to 7"),
        ("RANK", "-1", "RANK = -1 is not a whole number from 0 to 7"),
        ("LOCAL_RANK", "one", "LOCAL_RANK = 'one' is not a whole number from 0 to 7"),
        ("WORLD_SIZE", "0", "WORLD_SIZE = 0 is not a whole number from 1"),
        ("MASTER_PORT", "70000", "MASTER_PORT = 70000 is not a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_variable_is_told(name: str, value: str, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        read_launched_rank({**TORCHRUN, name: value})
    assert set(caught.value.rules) == {"rank-environment"}


def test_all_wrong_variables_are_told_at_once() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        read_launched_rank({**TORCHRUN, "RANK": "x", "MASTER_PORT": "y"})
    assert len(caught.value.problems) == 2


def test_the_launched_world_must_be_the_mesh() -> None:
    place = read_launched_rank(TORCHRUN)
    check_world_size(place, 8)
    with pytest.raises(EnvironmentProblem, match="8 ranks were started, but the mesh has 4") as e:
        check_world_size(place, 4)
    assert e.value.rules == ("launched-world-size",)


def test_a_port_is_any_unless_asked_for() -> None:
    assert wanted_port({}) == 0
    assert wanted_port({"MASTER_PORT": "1234"}) == 1234
    with pytest.raises(EnvironmentProblem) as caught:
        wanted_port({"MASTER_PORT": "http"})
    assert caught.value.rules == ("rank-environment",)


def test_local_ranks_get_defaults_that_the_user_can_overrule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert int(local_environment(10_000, {})["OMP_NUM_THREADS"]) == 1
    monkeypatch.setattr(environment, "num_usable_cores", lambda: 6.5)
    assert int(local_environment(2, {})["OMP_NUM_THREADS"]) == 3
    asked = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"}
    assert local_environment(2, asked).keys().isdisjoint(asked)


def test_everything_written_is_in_the_table() -> None:
    written = {
        **local_environment(2, {}, backend="nccl"),
        **dump_environment(Path(), "nccl", {}),
        **rank_environment(rank=1, world_size=2, port=5),
    }
    assert set(written) <= set(VARIABLES)
    assert written["RANK"] == written["LOCAL_RANK"] == "1"
    assert written["MASTER_PORT"] == "5"


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, (0, "")),
        ({"ACCELERATE_USE_FSDP": "true"}, (3, "FSDP (ACCELERATE_USE_FSDP)")),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, (0, "")),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "4"}, (0, "")),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            (2, "ZeRO 2 (ACCELERATE_USE_DEEPSPEED)"),
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, (0, "")),
    ],
)
def test_what_accelerate_was_asked_for(environment: dict[str, str], asked: tuple[int, str]) -> None:
    assert zero_stage_asked_of_accelerate(environment) == asked
    assert set(environment) <= set(VARIABLES)


def test_how_many_ranks_share_a_node_is_read_as_torchrun_writes_it() -> None:
    assert read_node_size({"LOCAL_WORLD_SIZE": "4"}) == 4
    for wrong in ({}, {"LOCAL_WORLD_SIZE": "none"}, {"LOCAL_WORLD_SIZE": "0"}):
        with pytest.raises(EnvironmentProblem, match="LOCAL_WORLD_SIZE") as caught:
            read_node_size(wrong)
        assert caught.value.rules == ("rank-environment",)
