"""A run goes on under every layout of ZeRO, with every optimizer and in every precision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS, STATE_FILE, read_index
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.engine import TrainEngine
from tests.training.small_runs import (
    FP64,
    checkpoint_of,
    read_steps,
    small_data,
    small_job,
    train,
    whole_state,
)

BF16 = ("precision.parameters=bf16",)
FP16 = (
    "precision.parameters=fp16",
    "precision.loss_scaling=dynamic",
    "precision.loss_scale=8388608.0",
    "precision.loss_scale_window=3",
)
NVME = ("zero.optimizer_offload=nvme", "zero.parameter_offload=nvme")
SHARD4 = ("mesh.dp_shard=4", "zero.stage=3")
DP2_TP2 = ("mesh.dp_replicate=2", "mesh.tp=2")
HYBRID = ("mesh.dp_replicate=2", "mesh.dp_shard=2", "zero.stage=1")
SHARD2_TP2 = ("mesh.dp_shard=2", "mesh.tp=2", "zero.stage=3", *NVME)
SHARD2_PP2 = ("mesh.dp_shard=2", "mesh.pp=2", "zero.stage=3", *NVME)
Steps = dict[int, tuple[float, ...]]
OPTIMIZERS = {
    "adamw": "exp_avg exp_avg_sq",
    "sgd": "momentum",
    "muon": "exp_avg exp_avg_sq momentum",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


def offloaded(settings: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return settings with a folder for files, where something rests in files."""
    folder.mkdir(exist_ok=True)
    in_files = any(one.endswith("=nvme") for one in settings)
    return (*settings, f"zero.offload_dir={folder}") if in_files else tuple(settings)


def go_on_under_four_layouts(
    rank_pool: RankPool, tmp_path: Path, data: Path, mathematics: Sequence[str]
) -> None:
    """Train a run in `alone`, and again in `0` to `3`, each going on where the one before was."""
    train(rank_pool, tmp_path / "alone", data, mathematics)
    unbroken = read_steps(tmp_path / "alone")
    resume, done = None, 0
    for number, layout in enumerate([SHARD4, DP2_TP2, HYBRID, SHARD2_PP2]):
        run, files = tmp_path / str(number), tmp_path / "files"
        train(rank_pool, run, data, (*mathematics, *offloaded(layout, files)), resume=resume)
        found = read_steps(run)
        assert sorted(found) == list(range(done + 1, 9))
        for step, values in found.items():
            assert values == pytest.approx(unbroken[step], rel=1e-12, abs=0)
        done = 2 * (number + 1)
        resume = checkpoint_of(run, done)
        assert list(files.iterdir()) == []


def assert_same_steps(found: Steps, unbroken: Steps, steps: Sequence[int]) -> None:
    """Check that steps are those of the unbroken run, bit for bit (the norm may be NaN)."""
    assert sorted(found) == list(steps)
    for step in steps:
        assert found[step] == pytest.approx(unbroken[step], rel=0, abs=0, nan_ok=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_under_four_layouts_one_after_the_other(
    kind: str, rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    mathematics = (*FP64, f"optimizer.kind={kind}")
    go_on_under_four_layouts(rank_pool, tmp_path, data, mathematics)
    expected = whole_state(checkpoint_of(tmp_path / "alone", 8))
    got = whole_state(checkpoint_of(tmp_path / "3", 8))
    kinds = {name.split("/")[0] for name in got}
    assert kinds == {PARAMETERS, *(f"optimizer.{one}" for one in OPTIMIZERS[kind].split())}
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("adamw", BF16), ("muon", BF16), ("sgd", FP16)],
    ids=["adamw bf16", "muon bf16", "sgd fp16"],
)
def test_under_its_own_layout_a_run_goes_on_bit_for_bit(
    kind: str, precision: tuple[str, ...], rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    layout = offloaded(SHARD2_TP2, tmp_path / "files")
    settings = (*layout, *precision, f"optimizer.kind={kind}")
    train(rank_pool, tmp_path / "whole", data, settings)
    middle = checkpoint_of(tmp_path / "whole", 4)
    train(rank_pool, tmp_path / "again", data, settings, resume=middle)
    for rank in range(4):
        unbroken = read_steps(tmp_path / "whole", rank)
        assert_same_steps(read_steps(tmp_path / "again", rank), unbroken, range(5, 9))
    expected = whole_state(checkpoint_of(tmp_path / "whole", 8))
    got = whole_state(checkpoint_of(tmp_path / "again", 8))
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(got[name], tensor), name


Held = tuple[dict[str, list[Shard]], dict[str, list[Shard]]]


def load(context: RankContext, argument: Any) -> Held:
    """Go on from a checkpoint; return parameters and master copies before the first step."""
    plan, path = Plan.from_json(argument["plan"]), Path(argument["path"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    try:
        state = {f"optimizer.{kind}": shards for kind, shards in engine.state().items()}
        loaded = load_checkpoint(
            path,
            wanted={PARAMETERS: engine.masters(), **state},
            identity=RunIdentity.from_plan(plan, argument["tokenizer"]),
            exchange=engine.groups.world,
        )
        engine.resume(loaded.state["engine"])
        return copied(engine.parameters()), copied(engine.masters())
    finally:
        engine.close()


def copied(shards: dict[str, list[Shard]]) -> dict[str, list[Shard]]:
    """Return copies, which outlive the engine."""
    return {
        name: [
            Shard(
                name=name,
                global_shape=one.global_shape,
                offset=one.offset,
                tensor=one.tensor.clone(),
                primary=one.primary,
            )
            for one in pieces
        ]
        for name, pieces in shards.items()
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "layout",
    [DP2_TP2, HYBRID, (*SHARD4, "zero.keep_whole_below=500"), SHARD2_PP2],
    ids=["stage 0", "stage 1", "stage 3, small ones whole", "stage 3, files"],
)
def test_what_is_saved_are_masters_and_parameters_are_the_masters_rounded(
    layout: tuple[str, ...], rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    train(rank_pool, tmp_path / "first", data, (*SHARD4, *BF16, "checkpoint.every=8"))
    path = checkpoint_of(tmp_path / "first", 8)
    entries = read_index(path).tensors[PARAMETERS]
    assert {entry.dtype for entry in entries.values()} == {"F32"}
    saved = whole_state(path)
    settings = (*offloaded(layout, tmp_path / "files"), *BF16, "checkpoint.every=8")
    argument = {
        "plan": small_job(settings).plan.to_json(),
        "path": str(path),
        "tokenizer": read_index(path).tokenizer_hash,
    }
    for parameters, masters in rank_pool.run(f"{__name__}:load", argument, 4):
        for held, dtype in ((masters, torch.float32), (parameters, torch.bfloat16)):
            assert held
            for name, shards in held.items():
                for shard in shards:
                    place = zip(shard.offset, shard.tensor.shape, strict=True)
                    part = tuple(slice(start, start + size) for start, size in place)
                    expected = saved[f"{PARAMETERS}/{name}"][part].to(dtype)
                    assert torch.equal(shard.tensor, expected), name


@pytest.mark.slow
def test_the_loss_scale_goes_on_and_skipped_steps_are_no_updates(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    settings = (*FP16, "train.steps=10")
    train(rank_pool, tmp_path / "whole", data, (*SHARD4, *settings))
    unbroken = read_steps(tmp_path / "whole")
    skipped = [step for step, values in unbroken.items() if values[3]]
    assert 1 in skipped
    assert len(skipped) < 10
    for step in (2, 4, 6, 8):
        path = checkpoint_of(tmp_path / "whole", step)
        position = json.loads((path / STATE_FILE).read_text())["engine"]
        assert position["num_updates"] == step - sum(one <= step for one in skipped)
        assert position["loss_scale"]["value"] == unbroken[step + 1][2]
    for number, layout in enumerate([SHARD4, DP2_TP2, HYBRID]):
        run, step = tmp_path / str(number), 2 * number + 4
        middle = checkpoint_of(tmp_path / "whole", step)
        train(rank_pool, run, data, (*layout, *settings), resume=middle)
        found = read_steps(run)
        for later in range(step + 1, 11):
            assert found[later][2:] == unbroken[later][2:]
            assert found[later][0] == pytest.approx(unbroken[later][0], rel=5e-3)
        if layout is SHARD4:
            assert_same_steps(found, unbroken, range(step + 1, 11))
