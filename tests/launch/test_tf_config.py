"""TF_CONFIG becomes ranks, addresses and a role, or one error that tells all that is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.core.errors import EnvironmentProblem
from echelon.launch.environment import (
    TF_CONFIG,
    VARIABLES,
    check_servers,
    is_launched,
    read_evaluator,
    read_launched_rank,
    read_node_size,
)
from echelon.launch.tf_config import read_tf_config
from echelon.telemetry.summary import step_losses

TWO = {"chief": ["h0:2222"], "worker": ["h1:2222", "h1:2223"]}
TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "h0", "MASTER_PORT": "2222"}


def config(cluster: object, type_: object = "worker", index: object = 0, **more: object) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": type_, "index": index}, **more})


def problems_of(text: str) -> dict[str, str]:
    with pytest.raises(EnvironmentProblem) as caught:
        read_tf_config(text)
    return {one.message: one.rule for one in caught.value.problems}


def test_a_chief_is_rank_0_and_workers_follow() -> None:
    """S53, L8: ranks, the world, where they meet, and which device of its host each has."""
    places = [
        read_launched_rank({TF_CONFIG: config(TWO, *task)})
        for task in (("chief", 0), ("worker", 0), ("worker", 1))
    ]
    assert [(one.rank, one.local_rank) for one in places] == [(0, 0), (1, 0), (2, 1)]
    assert {(one.world_size, one.master_addr, one.master_port) for one in places} == {
        (3, "h0", 2222)
    }
    assert not any(one.store_is_hosted for one in places)
    sizes = [read_node_size({TF_CONFIG: config(TWO, "worker", 1)})]
    assert sizes == [2]


def test_without_a_chief_worker_0_is_the_first_rank() -> None:
    """S53, L8: a launcher may write the index as text, call the chief master, and say more."""
    cluster = {"worker": ["a:1", "b:1"]}
    found = read_tf_config(config(cluster, "worker", "1", environment="cloud"))
    assert (found.rank, found.ranks, found.role) == (1, ("a:1", "b:1"), "worker")
    master = read_tf_config(config({"master": ["a:1"], "worker": ["b:1"]}, "master"))
    assert (master.role, master.rank) == ("chief", 0)


def test_it_is_a_launch_and_in_the_table() -> None:
    assert is_launched({TF_CONFIG: config(TWO)})
    assert not is_launched({TF_CONFIG: ""})
    assert not is_launched({})
    assert TF_CONFIG in VARIABLES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no table, but list"),
        ("{}", 'no table "cluster"'),
        (config({"workers": ["a:1"]}), "did you mean 'worker'"),
        (config({"worker": "a:1"}), "no list of addresses"),
        (config({"worker": ["a"]}), "'a' of 'worker' is not HOST:PORT"),
        (config({"worker": ["a:99999"]}), "not HOST:PORT"),
        (config({"worker": ["a:1", "a:1"]}), "two tasks have one address"),
        (config({"chief": ["a:1", "b:1"]}, "chief"), "2 chiefs"),
        (config({"worker": ["a:1"]}, "boss"), "the type 'boss'"),
        (config({"worker": ["a:1"]}, "worker", -1), "the index -1"),
        (config({"worker": ["a:1"]}, "worker", 1), "is worker 1, and"),
        (config({"worker": ["a:1"]}, "chief"), "is chief 0, and"),
        (config({"ps": ["a:1"]}, "ps"), "neither a chief nor a worker"),
    ],
)
def test_what_is_no_such_config_is_told(text: str, said: str) -> None:
    found = problems_of(text)
    assert set(found.values()) == {"tf-config-form"}
    assert any(said in message for message in found), found


def test_all_problems_are_told_at_once() -> None:
    found = problems_of(config({"worker": ["a", "b:0"], "wrker": ["c:1"]}, "boss", 1.5))
    assert len(found) == 5


def test_servers_are_the_last_ranks() -> None:
    """S53, L8: ps tasks are ranks after the chief and the workers, and the plan must have them."""
    cluster = {"ps": ["h1:1", "h2:1"], **TWO}
    tasks = (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1))
    places = [read_launched_rank({TF_CONFIG: config(cluster, *task)}) for task in tasks]
    assert [one.rank for one in places] == [0, 1, 2, 3, 4]
    assert [one.local_rank for one in places] == [0, 0, 1, 2, 0]
    assert {(one.world_size, one.servers, one.master_addr) for one in places} == {(5, 2, "h0")}
    check_servers(places[0], 2)
    check_servers(replace(places[0], servers=None), 1)
    with pytest.raises(
        EnvironmentProblem, match=r"2 ps tasks of 5, but servers\.count = 1"
    ) as caught:
        check_servers(places[3], 1)
    assert caught.value.rules == ("tf-config-servers",)


def test_an_evaluator_is_no_rank_and_ranks_do_not_mind_it() -> None:
    """S53, L8: its task is refused by a rule; a rank beside it is what it is without it."""
    cluster = {**TWO, "evaluator": ["e:1"]}
    assert read_launched_rank({TF_CONFIG: config(cluster, "chief")}).world_size == 3
    assert read_evaluator({TF_CONFIG: config(cluster, "chief")}) is None
    assert read_evaluator({}) is None
    beside = read_evaluator({TF_CONFIG: config(TWO, "evaluator")})
    assert beside is not None
    assert (beside.rank, beside.world_size, beside.master_addr) == (3, 3, "h0")
    for listed in (TWO, cluster):
        for ask in (read_launched_rank, read_node_size):
            with pytest.raises(EnvironmentProblem, match="evaluator 0, which is no rank") as caught:
                ask({TF_CONFIG: config(listed, "evaluator")})
            assert caught.value.rules == ("tf-config-role",)


@pytest.mark.parametrize(("dp", "servers"), [(2, 0), (3, 0), (2, 2), (1, 2)])
def test_a_plan_with_other_servers_is_refused(
    dp: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S53, L8: in whichever task it is read, and for a plan that was made elsewhere too."""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    sets = [f"mesh.dp_replicate={dp}", f"servers.count={servers}", "batch.global_sequences=12"]
    plan = ec.plan("nano", settings=sets)
    for task in (("worker", 1), ("ps", 0)):
        monkeypatch.setenv(TF_CONFIG, config(cluster, *task))
        with pytest.raises(ec.EchelonError) as caught:
            ec.train("nano", settings=sets)
        told = {one.rule: one for one in caught.value.problems}
        assert ("world-size-is-product" in told) == (dp + servers != 3)
        assert f"1 ps tasks and 2 others, but servers.count = {servers}" in str(caught.value)
        assert told["tf-config-servers"].suggestions[0] == "servers.count = 1"
        with pytest.raises(EnvironmentProblem) as refused:
            ec.train(plan, data="stdlib")
        assert refused.value.rules == ("tf-config-servers",)


def test_a_launcher_that_says_otherwise_is_a_conflict() -> None:
    both = {TF_CONFIG: config(TWO, "worker", 0), **TORCHRUN}
    agreed = read_launched_rank({**both, "RANK": "1", "WORLD_SIZE": "3"})
    assert (agreed.rank, agreed.world_size) == (1, 3)
    with pytest.raises(EnvironmentProblem) as caught:
        read_launched_rank({**both, "RANK": "0", "WORLD_SIZE": "2"})
    assert caught.value.rules == ("tf-config-agrees",)
    assert "rank 1 of 3" in caught.value.problems[0].message
    assert "rank 0 of 2" in caught.value.problems[0].message


SCRIPT = """
import sys
import echelon as ec

with ec.strategy(sys.argv[1]).scope() as scope:
    model = scope.model("nano", settings=sys.argv[2:])
history = model.fit(data="words.txt")
print(scope.num_replicas_in_sync, history.run.rank, *map(repr, history.losses))
"""
TINY = (
    *("model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=2"),
    *("model.head_dim=8", "model.ffn=24", "train.steps=4", "optimizer.warmup_steps=1"),
    *("batch.global_sequences=4", "batch.microbatch_sequences=1", "batch.sequence_length=16"),
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def started(
    folder: Path,
    tf_config: str,
    words: Mapping[str, Any],
    command: Sequence[str] = ("script.py", "MultiWorkerMirroredStrategy"),
    settings: Sequence[str] = TINY,
) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return subprocess.Popen(
        [sys.executable, *command, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", TF_CONFIG: tf_config, **words},
    )


@pytest.mark.slow
@pytest.mark.system("S53")
def test_two_local_workers_run_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S53, L8: two processes, each with its own TF_CONFIG, train as two ranks started here do."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    workers = [started(tmp_path, config(cluster, "worker", rank), {}) for rank in range(2)]
    told = [one.communicate(timeout=200) for one in workers]
    assert [one.returncode for one in workers] == [0, 0], told
    said = [out.split() for out, _ in told]
    assert [words[:2] for words in said] == [["2", "0"], ["2", "1"]]
    losses = [[float(word) for word in words[2:]] for words in said]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    monkeypatch.chdir(tmp_path)
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        model = scope.model("nano", settings=TINY)
    here = model.fit(data="words.txt", settings=["train.run_name=here"])
    assert list(here.losses) == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.system("S53")
def test_a_chief_a_worker_and_a_server_run_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S53, L8: three processes form one run with a parameter server, as three started here do."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"chief": ports[:1], "worker": ports[1:2], "ps": ports[2:]}
    command = ("script.py", "ParameterServerStrategy")
    tasks = [
        started(tmp_path, config(cluster, role), {}, command) for role in ("ps", "worker", "chief")
    ]
    told = [one.communicate(timeout=200) for one in tasks]
    assert [one.returncode for one in tasks] == [0, 0, 0], told
    said = [out.split() for out, _ in told]
    assert [words[:2] for words in said] == [["2", "2"], ["2", "1"], ["2", "0"]]
    losses = [[float(word) for word in words[2:]] for words in said]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 4
    monkeypatch.chdir(tmp_path)
    sets = ["mesh.dp_replicate=2", "servers.count=1", "train.run_name=here"]
    here = ec.train("nano", data="words.txt", settings=[*TINY, *sets])
    assert list(step_losses(here.run)) == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.system("S53")
def test_an_evaluator_follows_the_checkpoints_of_the_ranks(tmp_path: Path) -> None:
    """S53, L8: a chief and a server train; the evaluator finds the losses that they validate."""
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    ports = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"chief": ports[:1], "ps": ports[1:]}
    sets = [*TINY, 'data.source="words.txt"', "servers.count=1", "train.validate_every=2"]
    sets += ["checkpoint.every=2", 'checkpoint.keep="all"', "data.validation_fraction=0.2"]
    words = [word for one in sets for word in ("--set", one)]
    command = ("-m", "echelon", "train", "nano", "--json", *words)
    tasks = [
        started(tmp_path, config(cluster, role), {}, command, ())
        for role in ("evaluator", "ps", "chief")
    ]
    told = [one.communicate(timeout=250) for one in tasks]
    assert [one.returncode for one in tasks] == [0, 0, 0], told
    found = json.loads(told[0][0])["checkpoints"]
    last = json.loads(told[2][0])
    assert found[-1]["step"] == 4
    assert found[-1]["validation"] == pytest.approx(last["last_validation"], rel=1e-5)
    assert Path(found[-1]["path"]).parent.parent.name == Path(last["run"]).name
    assert f"step-000004: validation {found[-1]['validation']:.4f}" in told[0][1]


def test_a_wrong_config_ends_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    process = started(tmp_path, config({"worker": ["a"]}), {})
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "tf-config-form" in said
    assert not (tmp_path / "runs").exists()
