"""Planned bytes of ranks compared with free memory: a refusal names plans that would fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import echelon as ec
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.errors import EnvironmentProblem
from echelon.core.plan import Plan
from echelon.cost.peak.rank_peak import PeakWalk, memory_by_place
from echelon.launch import room
from echelon.launch.host import START_BYTES, MemoryLimit
from echelon.launch.room import (
    GPU_CONTEXT_BYTES,
    RANK_PROCESS_BYTES,
    Room,
    need_of_plan,
    room_problems,
)

MIB = 2**20
GIB = 2**30


def plan_of(*settings: str, run: str = "nano") -> Plan:
    return load_job(run, settings).plan


def free(num_bytes: float, gpus: tuple[int | None, ...] = ()) -> Room:
    limit = MemoryLimit(name="this machine", total_bytes=64 * GIB, free_bytes=int(num_bytes))
    return Room(host=limit, gpus=gpus)


def give(monkeypatch: pytest.MonkeyPatch, reading: Room) -> None:
    monkeypatch.setattr(room, "read_room", lambda backend, num_ranks: reading)


def test_what_a_host_needs_is_the_planned_peak_and_a_process_of_each_rank() -> None:
    plan = plan_of("mesh.dp_replicate=4")
    need = need_of_plan(plan, range(4))
    overhead = START_BYTES + 4 * RANK_PROCESS_BYTES
    assert need.num_ranks == 4
    assert need.host_bytes == pytest.approx(4 * PeakWalk(plan).peak(0).bytes + overhead)


def test_room_is_refused_by_one_byte_with_the_arithmetic() -> None:
    plan = plan_of("mesh.dp_replicate=4")
    ranks = range(4)
    needed = need_of_plan(plan, ranks).host_bytes
    assert room_problems(plan, ranks, free(needed)) == []
    (problem,) = room_problems(plan, ranks, free(needed - 1))
    assert problem.rule == "enough-memory"
    (place,) = memory_by_place(plan, ranks)
    assert f"4 x {place.host_bytes / MIB:.2f} MiB (" in problem.message
    assert "optimizer 5.88 MiB" in problem.message
    assert f"= {needed / MIB:.2f} MiB; this machine: 64.00 GiB - " in problem.message
    assert "--allow-overcommit" in problem.suggestions


def test_each_leaner_plan_that_is_named_fits() -> None:
    plan = plan_of("mesh.dp_replicate=8", "batch.global_sequences=16")
    space = free(need_of_plan(plan, range(8)).host_bytes / 2)
    (problem,) = room_problems(plan, range(8), space)
    named = [text for text in problem.suggestions if text.startswith(("mesh.", "batch.", "recom"))]
    assert named
    for setting in named:
        pairs = [one.split(" = ") for one in setting.split(" with ")]
        sets = {"mesh.dp_replicate": "8", "batch.global_sequences": "16", **dict(pairs)}
        leaner = plan_of(*(f"{key}={value}" for key, value in sets.items()))
        assert room_problems(leaner, range(leaner.mesh.world_size), space) == []


def test_a_gpu_is_compared_with_its_own_memory() -> None:
    plan = plan_of(run="llama3-8b-zero3")
    (place,) = memory_by_place(plan, range(8))
    needed = int(place.device_bytes + GPU_CONTEXT_BYTES) + 1
    enough = (needed,) * 8
    assert not place.host
    assert room_problems(plan, range(8), free(64 * GIB, enough)) == []
    assert room_problems(plan, range(8), free(64 * GIB, (None,) * 8)) == []
    (problem,) = room_problems(plan, range(8), free(256 * GIB, (*enough[1:], 20 * GIB)))
    assert problem.rule == "enough-memory"
    assert "of its GPU" in problem.message
    assert 'zero.optimizer_offload = "host"' in problem.suggestions


def test_offloaded_state_of_gpus_is_memory_of_their_host() -> None:
    plan = plan_of("zero.optimizer_offload=host", run="llama3-8b-zero3")
    (place,) = memory_by_place(plan, range(8))
    assert place.host_bytes > 11 * GIB
    (problem,) = room_problems(plan, range(8), free(32 * GIB))
    assert "8 ranks on this host" in problem.message


def test_a_large_model_on_a_small_host_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, free(22 * GIB))
    assert main(["train", "llama3-8b", "--set", "data.source=stdlib"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error[enough-memory]: 1 rank on this host would take 1 x 194.14 GiB")
    assert "a model of about" in error
    assert "--allow-overcommit" in error


def test_data_and_memory_that_lack_are_told_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, free(22 * GIB))
    assert main(["train", "llama3-8b", "--json"]) == 3
    printed = json.loads(capsys.readouterr().out)
    rules = [problem["rule"] for problem in printed["problems"]]
    assert rules == ["data-is-named", "enough-memory"]


TINY = (
    *("train.steps=1", "optimizer.warmup_steps=0", "train.validate_every=never"),
    *("batch.sequence_length=16", "batch.global_sequences=2", "batch.microbatch_sequences=1"),
)


def test_who_insists_trains_and_generates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    give(monkeypatch, free(MIB))
    text = "some words, and some words more\n" * 40
    source = f"{tmp_path}/text.txt"
    with open(source, "w", encoding="ascii") as file:
        file.write(text)
    sets = [*TINY, f"train.runs_dir={tmp_path}/runs", "checkpoint.every=1"]
    with pytest.raises(EnvironmentProblem, match="enough-memory"):
        ec.train("nano", data=source, settings=sets)
    run = ec.train("nano", data=source, settings=sets, allow_overcommit=True)
    assert run.summary.steps == 1
    with pytest.raises(EnvironmentProblem, match=r"parameters 2\.\d+ MiB, cache"):
        ec.generate(run, "a", max_tokens=2)
    assert ec.generate(run, "a", max_tokens=2, allow_overcommit=True).tokens


def test_a_launched_host_checks_the_ranks_up_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {
        **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }
    assert room.ranks_of_this_host(8) == range(8)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert room.ranks_of_this_host(8) == range(4, 6)
    assert [*room.ranks_of_this_host(3)] == []
    assert room_problems(plan_of("mesh.dp_replicate=3"), range(3, 3)) == []


def test_the_gpu_of_a_rank_is_the_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    from echelon.launch.gpus import free_gpu_bytes

    class Memory:
        def __init__(self, free: int) -> None:
            self.free = free

    def by_index(index: int) -> int:
        if index > 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", by_index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", len)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Memory(10 * handle))
    assert free_gpu_bytes(2, {}) == (0, 10)
    assert free_gpu_bytes(3, {"CUDA_VISIBLE_DEVICES": "3,GPU-1,9"}) == (30, 50, None)


def test_recompute_is_a_change_that_is_named_where_it_helps() -> None:
    plan = plan_of("model.layers=8", "batch.sequence_length=1024", "batch.microbatch_sequences=2")
    lean = replace(plan, layout=replace(plan.layout, microbatch_sequences=1))
    between = need_of_plan(lean, range(1)).host_bytes
    (problem,) = room_problems(plan, range(1), free(between))
    assert problem.suggestions[0] == "batch.microbatch_sequences = 1"
