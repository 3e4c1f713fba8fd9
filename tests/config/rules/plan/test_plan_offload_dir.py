"""The folder of offloaded slices must hold those of this machine, before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import echelon as ec
from echelon.api.training import train_job
from echelon.config.load import load_job
from echelon.config.rules.finders import offload_problems, offloaded_bytes, require_offload_dir
from echelon.core.errors import EchelonError, EnvironmentProblem
from echelon.core.plan import Plan

OFFLOAD = ["mesh.dp_shard=2", "zero.stage=3", "zero.optimizer_offload=nvme"]


def plan_in(folder: Path, sets: Sequence[str] = ()) -> Plan:
    return load_job("nano", [*OFFLOAD, f"zero.offload_dir={folder}", *sets]).plan


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every file system have this much room."""
    space = SimpleNamespace(f_bavail=free, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda _: space)


def test_the_bytes_of_a_machine_are_those_of_its_ranks(tmp_path: Path) -> None:
    model = ["model.tied=false", "model.vocab=256", "data.source=x"]
    plan = plan_in(tmp_path, [*model, "mesh.pp=2", "precision.parameters=bf16"])
    block = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 352 + 2 * 128
    ends = (256 * 128, 256 * 128 + 128)
    # Master copy and two moments in fp32; each stage has two blocks and an end, on two ranks.
    each = [12 * (2 * block + end) // 2 for end in ends]
    assert offloaded_bytes(plan, range(4)) == 2 * sum(each)
    assert offloaded_bytes(plan, [0]) == offloaded_bytes(plan, [1]) == each[0]
    assert offloaded_bytes(plan, [3]) == each[1]
    with_parameters = plan_in(tmp_path, [*model, "mesh.pp=2", "zero.parameter_offload=nvme"])
    assert offloaded_bytes(with_parameters, range(4)) == 2 * sum(each)


def test_room_for_exactly_the_slices_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_in(tmp_path)
    needed = offloaded_bytes(plan, range(2))
    set_free_bytes(monkeypatch, needed)
    assert offload_problems(plan, range(2)) == []
    set_free_bytes(monkeypatch, needed - 1)
    (problem,) = offload_problems(plan, range(2))
    assert problem.rule == "offload-space"
    assert problem.suggestions[1:] == ('zero.optimizer_offload = "host"',)
    assert offload_problems(plan, [0]) == []


def test_a_run_without_files_needs_no_folder(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    plan = load_job("nano", ["mesh.dp_shard=2", "zero.stage=1"]).plan
    assert offload_problems(plan, range(2)) == []
    zero = replace(plan.layout.zero, optimizer_offload="host", offload_dir=str(missing))
    host = replace(plan, layout=replace(plan.layout, zero=zero))
    assert offload_problems(host, range(2)) == []


def test_a_plan_made_by_hand_must_name_its_folder(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    zero = replace(plan.layout.zero, offload_dir="")
    nowhere = replace(plan, layout=replace(plan.layout, zero=zero))
    with pytest.raises(EnvironmentProblem) as caught:
        require_offload_dir(nowhere, range(2))
    assert caught.value.rules == ("nvme-needs-folder",)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda path: None, "offload-folder-exists"),
        (lambda path: path.write_text("a file"), "offload-folder-exists"),
        (lambda path: path.symlink_to("/proc/self"), "offload-folder"),
    ],
    ids=["missing", "a file", "where no file can be made"],
)
def test_train_and_prove_say_so_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], rule: str
) -> None:
    folder = tmp_path / "fast"
    make(folder)
    monkeypatch.setattr("echelon.launch.local.supervisor.run_ranks", no_ranks)
    monkeypatch.setattr("echelon.launch.local.supervisor.RankPool", no_ranks)
    flag = f"zero.offload_dir={folder}"
    job = load_job("nano", [*OFFLOAD, flag, f"train.runs_dir={tmp_path / 'runs'}"])
    with pytest.raises(EchelonError) as caught:
        train_job(job)
    assert caught.value.exit_code == 3
    assert caught.value.problems[0].rule.startswith(rule)
    assert caught.value.problems[0].set_by == f"--set {flag}"
    assert not (tmp_path / "runs").exists()
    with pytest.raises(EnvironmentProblem) as caught:
        ec.prove(job.plan)
    assert caught.value.problems[0].rule.startswith(rule)


def no_ranks(*_: object, **__: object) -> None:
    raise AssertionError("ranks were started")


def test_under_torchrun_the_last_rank_of_a_host_asks_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job("nano", [*OFFLOAD, f"zero.offload_dir={tmp_path}", "mesh.pp=2"])
    # Two hosts of two ranks each.
    set_free_bytes(monkeypatch, offloaded_bytes(job.plan, [2, 3]) - 1)
    monkeypatch.setattr("echelon.launch.launched.rank.run_launched_rank", no_ranks)
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for rank, expected in ((2, "ranks were started"), (3, r"error\[offload-space\]")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank - 2))
        with pytest.raises((AssertionError, EnvironmentProblem), match=expected):
            train_job(job)


def test_a_proof_needs_room_for_a_small_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*OFFLOAD, f"zero.offload_dir={tmp_path}", "cluster.preset=8xh100"]
    job = load_job("llama3-8b", [*sets, "train.steps=1"])
    monkeypatch.setattr("echelon.launch.local.supervisor.RankPool", no_ranks)
    set_free_bytes(monkeypatch, 2**20)
    assert [p.rule for p in offload_problems(job.plan, range(2))] == ["offload-space"]
    with pytest.raises(AssertionError, match="ranks were started"):
        ec.prove(job.plan)
