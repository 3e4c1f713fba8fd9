"""Checkpoints of adapters: the frozen weights once beside them, bytes by formula, any layout."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.core.errors import CheckpointError
from echelon.core.parameters import is_adapter
from echelon.cost.bytes.held import StoredBytes, stored_bytes
from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.index import base_of, read_index
from tests.training.small_runs import (
    TINY,
    checkpoint_of,
    read_steps,
    small_data,
    small_job,
    train,
    whole_state,
)

LORA = ("lora.rank=4", "lora.alpha=16", "optimizer.learning_rate=0.02", "optimizer.warmup_steps=0")
BF16 = ("precision.parameters=bf16", "precision.gradients=bf16", "precision.master=fp32")


def written_bytes(path: Path) -> StoredBytes:
    """Return the bytes of the tensors in a checkpoint and below it, by their files."""
    index, sizes = read_index(path), {"F32": 4, "BF16": 2}
    found = {"trained": 0, "optimizer": 0, "base": 0}
    for kind, table in index.tensors.items():
        for entry in table.values():
            below = any("/base/" in piece.file for piece in entry.pieces)
            part = "base" if below else "optimizer" if kind != "parameters" else "trained"
            found[part] += prod(entry.shape) * sizes[entry.dtype]
    return StoredBytes(**found)


def check_run(run: Path, settings: tuple[str, ...]) -> None:
    """Check what the folders of a run hold, by formula and by the files themselves."""
    told = stored_bytes(small_job([*settings]).plan.mathematics)
    steps = sorted((run / "checkpoints").glob("step-*"))
    assert steps
    for path in steps:
        assert written_bytes(path) == told
        assert all(is_adapter(name.partition("/")[2]) for name in own_tensors(path))
        payload = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        assert told.checkpoint <= payload < told.checkpoint + header_bytes(path)
    base = run / "checkpoints" / "base"
    payload = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert told.base <= payload < told.base + header_bytes(base)


def own_tensors(path: Path) -> list[str]:
    tables = read_index(path).tensors.items()
    return [
        f"{kind}/{name}"
        for kind, table in tables
        for name, entry in table.items()
        if not any("/base/" in piece.file for piece in entry.pieces)
    ]


def header_bytes(folder: Path) -> int:
    """Return what headers of the files of a folder take at most: 300 bytes for a piece."""
    return sum(
        8 + 200 + 300 * file.read_bytes()[: 1 << 16].count(b"data_offsets")
        for file in folder.glob("*.safetensors")
    )


def test_checkpoints_hold_adapters_and_stand_on_one_base(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    job = [*LORA, "train.steps=2", "checkpoint.every=1"]
    train(rank_pool, tmp_path / "run", small_data(tmp_path), job)
    check_run(tmp_path / "run", tuple(job))


@pytest.mark.slow
def test_another_layout_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    data, job = small_data(tmp_path), [*LORA, "train.steps=4", "checkpoint.every=1"]
    train(rank_pool, tmp_path / "a", data, [*job, "mesh.tp=2"])
    check_run(tmp_path / "a", tuple(job))
    # What was saved in the middle goes on under another layout, in another folder.
    middle = checkpoint_of(tmp_path / "a", 2)
    train(rank_pool, tmp_path / "b", data, [*job, "mesh.dp_shard=2", "zero.stage=3"], middle)
    check_run(tmp_path / "b", tuple(job))
    whole, again = (whole_state(checkpoint_of(tmp_path / run, 4)) for run in "ab")
    assert whole.keys() == again.keys()
    for name, one in whole.items():
        frozen = name.startswith("parameters/") and not is_adapter(name)
        tolerance = 0.0 if frozen else 2e-4
        torch.testing.assert_close(one, again[name], rtol=tolerance, atol=tolerance / 100)
    losses = [read_steps(tmp_path / run)[4][0] for run in "ab"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("mesh.pp=2", "pipeline.schedule=zb-h1"),
        ("mesh.cp=2", "zero.stage=1"),
        ("mesh.dp_shard=2", "mesh.tp=2", "mesh.pp=2", "zero.stage=2"),
    ],
    ids=["stages", "context", "all"],
)
def test_any_layout_goes_on_with_the_bits_of_its_own(
    layout: tuple[str, ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    data, job = small_data(tmp_path), [*LORA, *BF16, "train.steps=4", *layout]
    train(rank_pool, tmp_path / "a", data, job)
    train(rank_pool, tmp_path / "b", data, job, checkpoint_of(tmp_path / "a", 2))
    for run in "ab":
        check_run(tmp_path / run, tuple(job))
    whole, again = (whole_state(checkpoint_of(tmp_path / run, 4)) for run in "ab")
    assert all(torch.equal(one, again[name]) for name, one in whole.items())
    # A run that goes on in its own folder keeps the base that it has.
    before = base_of(checkpoint_of(tmp_path / "a", 4))
    longer = [one for one in job if one != "train.steps=4"]
    train(
        rank_pool,
        tmp_path / "a",
        data,
        [*longer, "train.steps=6"],
        checkpoint_of(tmp_path / "a", 4),
    )
    assert base_of(checkpoint_of(tmp_path / "a", 6)) == before


@pytest.mark.slow
def test_the_base_that_a_run_started_from_may_move(tmp_path: Path) -> None:
    """Export, generation and resuming need what the run wrote, and nothing else."""
    words = tmp_path / "words.txt"
    words.write_text("".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)))
    places = [f'train.runs_dir="{tmp_path}/runs"', f'data.source="{words}"']
    tiny = [one for one in TINY if not one.startswith(("train.steps", "optimizer.warmup"))]
    first = ec.train(
        "nano",
        settings=[
            *tiny,
            "optimizer.warmup_steps=1",
            *places,
            "train.steps=2",
            "train.run_name=first",
        ],
    )
    ec.export_weights(first, tmp_path / "base", dtype="fp32")
    job = [*tiny, *places, *LORA, "train.steps=4"]
    tuned = ec.train(
        "nano", settings=[*job, "train.run_name=tuned", f"train.weights={tmp_path / 'base'}"]
    )
    before = ec.export_weights(tuned, tmp_path / "before", dtype="fp32")
    shutil.rmtree(tmp_path / "base")
    shutil.move(tmp_path / "runs/tuned", tmp_path / "moved")
    after = ec.export_weights(tmp_path / "moved", tmp_path / "after", dtype="fp32")
    for name in before.files:
        assert (before.folder / name).read_bytes() == (after.folder / name).read_bytes()
    assert ec.generate(tmp_path / "moved", ["line"], max_tokens=2)
    # A checkpoint without its base is refused before a rank starts.
    shutil.rmtree(tmp_path / "moved/checkpoints/base")
    with pytest.raises(CheckpointError) as caught:
        ec.train("nano", settings=[*job, "train.run_name=on"], resume=tmp_path / "moved")
    assert caught.value.rules == ("checkpoint-base",)
