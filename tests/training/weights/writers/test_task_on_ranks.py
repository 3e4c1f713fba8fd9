"""Ranks that write a folder together: the bytes of one, nothing where one of them dies."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.core.errors import CheckpointError, ConfigError, Interrupted
from echelon.core.serialize import from_json, to_json
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.training.checkpoint.folder import find_checkpoint
from echelon.training.weights.writers import task as writing
from echelon.training.weights.writers.task import ExportTask
from tests.training.small_runs import trained_run

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ec.TrainResult:
    return trained_run(tmp_path_factory.mktemp("trained"))


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below a folder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def task_of(run: ec.TrainResult, folder: Path, to: Any, **more: Any) -> ExportTask:
    """Return what is asked of ranks that write into a folder."""
    from echelon.telemetry.run_directory import run_of

    folder.mkdir()
    plain: dict[str, Any] = {
        **{"model_type": None, "file_bytes": 10**9, "threads": 2, "tp": 1, "pp": 1},
        **{"adapters": False, "dtype": "fp32", "checkpoint": str(find_checkpoint(run.run).path)},
    }
    shape = run_of(run.run).plan().model
    return ExportTask(folder=str(folder), to=to, shape=shape, **{**plain, **more})


FORMATS: Mapping[str, Mapping[str, Any]] = {
    "hf": {},
    "hf, several files": {"file_bytes": 20_000},
    "echelon": {"file_bytes": 20_000},
    "dcp": {},
    "deepspeed": {},
    "megatron": {},
    "megatron-legacy": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hf", 2),
        ("echelon", 2),
        ("dcp", 2),
        *(
            pytest.param(name, count, marks=pytest.mark.slow)
            for name in FORMATS
            for count in (2, 3)
            if (name, count) not in (("hf", 2), ("echelon", 2), ("dcp", 2), ("megatron-legacy", 3))
        ),
    ],
)
def test_ranks_write_the_bytes_of_one(
    rank_pool: RankPool, run: ec.TrainResult, name: str, count: int, tmp_path: Path
) -> None:
    to, more = name.partition(",")[0], FORMATS[name]
    folders: list[Path] = []
    told: list[Any] = []
    for world in (1, count):
        folder = tmp_path / str(world)
        task = to_json(task_of(run, folder, to, **more))
        told.append(rank_pool.run(writing.WRITE_RANK, task, world))
        folders.append(folder)
    assert digests(folders[0]) == digests(folders[1])
    assert len(digests(folders[0])) > 0
    assert told[1] == told[0] * count


def count_parts(context: RankContext, argument: Mapping[str, Any]) -> int:
    """Write a share, and return how many parts this rank wrote."""
    task, told = from_json(ExportTask, argument), [0]

    def tell(_: str) -> None:
        told[0] += 1

    writers = writing.Writers(task.threads, writing.WritersExchange(context), tell)
    writing.write_weights(task, writers)
    return told[0]


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_each_rank_writes_some(
    rank_pool: RankPool, run: ec.TrainResult, to: str, tmp_path: Path
) -> None:
    counts = rank_pool.run(count_parts, to_json(task_of(run, tmp_path / "out", to)), 2)
    assert min(counts) > 0
    assert sum(counts) == {"hf": 20, "dcp": 16}[to]


@pytest.mark.slow
def test_ranks_of_this_machine_leave_a_whole_folder(run: ec.TrainResult, tmp_path: Path) -> None:
    """Processes of this machine: a folder that is whole, the same as that of one."""
    one = ec.export_weights(run, tmp_path / "one", dtype="fp32")
    two = ec.export_weights(run, tmp_path / "two", dtype="fp32", ranks=2)
    assert (one.ranks, two.ranks) == (1, 2)
    assert digests(one.folder) == digests(two.folder)
    assert "config.json" in digests(two.folder)


def test_more_ranks_than_parts_are_refused_before_any_starts(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--ranks is 17, and a folder of dcp has 16 parts"):
        ec.export_weights(run, tmp_path / "out", to="dcp", ranks=17)
    with pytest.raises(ConfigError, match=r"--ranks is 2, .* has 1 stage"):
        ec.export_weights(run, tmp_path / "out", to="megatron-legacy", ranks=2)
    with pytest.raises(ConfigError, match="--ranks is 0, and at least 1"):
        ec.export_weights(run, tmp_path / "out", ranks=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_and_leaves_nothing(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run.run, copied)
    checkpoint = find_checkpoint(copied).path
    victim = sorted(checkpoint.glob("*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        ec.export_weights(copied, tmp_path / "out", dtype="fp32", ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def die(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Write as a rank does; the second is killed when it begins its first part."""
    task = from_json(ExportTask, argument)

    def tell(_: str) -> None:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    writers = writing.Writers(task.threads, writing.WritersExchange(context), tell)
    writing.write_weights(task, writers)


@pytest.mark.parametrize("to", ["hf", pytest.param("dcp", marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_nothing_and_is_named(
    run: ec.TrainResult, to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WRITE_RANK", f"{__name__}:die")
    with pytest.raises(RankFailure, match="rank 1") as caught:
        ec.export_weights(run, tmp_path / "out", to=to, dtype="fp32", ranks=2)
    assert caught.value.rank == 1
    assert list(tmp_path.iterdir()) == []


def begin_twice(context: RankContext, argument: Mapping[str, Any]) -> list[int]:
    """Return how far a rank was as one tensor after another was begun; then it is asked to stop."""
    writers = writing.writers_of(context, None)
    counts: list[int] = []
    for _ in range(2):
        writers.begin()
        counts.append(context.progress.count)
    context.progress.request_stop()
    with pytest.raises(Interrupted) as caught:
        writers.begin()
    assert (caught.value.rules, caught.value.exit_code) == (("run-interrupted",), 130)
    return counts


def test_a_rank_moves_with_each_tensor_and_stops_when_asked(rank_pool: RankPool) -> None:
    (counts,) = rank_pool.run(begin_twice, {}, 1)
    assert counts[1] == counts[0] + 1


@pytest.mark.slow
def test_torchrun_starts_the_ranks(run: ec.TrainResult, tmp_path: Path) -> None:
    """Each process is a rank; the first one says what was written."""
    one = ec.export_weights(run, tmp_path / "one", to="dcp", dtype="fp32")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", "29653", "-m", "echelon", "export", "weights", str(run.run)),
        *("--to", "dcp", "--dtype", "fp32", "--out", str(tmp_path / "two")),
    ]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:.", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torchtitan") == 1
    assert digests(one.folder) == digests(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
