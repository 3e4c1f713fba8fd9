"""Ranks that generate read their part of a checkpoint, of any layout; a rank that dies is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.config.generation import Request, Sampling, generation_plan
from echelon.core.errors import RunFailed
from echelon.core.plan import Plan
from echelon.core.serialize import to_json
from echelon.inference.generator import Generator
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool, run_ranks
from echelon.training.checkpoint import load
from echelon.training.checkpoint.folder import find_latest
from echelon.training.checkpoint.index import read_index
from echelon.training.inference import GenerateTask, RankWriting, generate_rank, rank_cache_size
from echelon.training.whole_run import continue_tokens, load_decoder
from tests.training.small_runs import trained_run

EXPERTS = (
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=24",
    "model.experts.first_dense_layers=1",
    "experts.balance=bias",
    "experts.bias_rate=0.3",
    "mesh.dp_shard=2",
    "mesh.ep=2",
    "zero.stage=3",
)
PROMPTS = ((108, 105, 110, 101), (49,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ec.TrainResult:
    return trained_run(tmp_path_factory.mktemp("trained"), EXPERTS)


def task_of(run: ec.TrainResult, *settings: str) -> GenerateTask:
    trained = Plan.from_json((run.run / "plan.json").read_text())
    checkpoint = find_latest(run.run).path
    return GenerateTask(
        plan=generation_plan(trained, settings),
        trained=trained,
        checkpoint=str(checkpoint),
        tokenizer_hash=read_index(checkpoint).tokenizer_hash,
        prompts=PROMPTS,
        request=Request(max_tokens=10, sampling=Sampling()),
        end=256,
    )


@pytest.mark.quick("mesh.tp=2-experts.expert_tp=2")
@pytest.mark.parametrize(
    "settings",
    [(), ("mesh.tp=2",), ("mesh.tp=2", "mesh.pp=2"), ("mesh.tp=2", "experts.expert_tp=2")],
    ids="-".join,
)
def test_any_layout_reads_the_checkpoint_of_any_other(
    settings: tuple[str, ...], run: ec.TrainResult, rank_pool: RankPool
) -> None:
    task = task_of(run, *settings)
    decoder = load_decoder(task.trained, Path(task.checkpoint), task.tokenizer_hash)
    expected = [tuple(continue_tokens(decoder, list(one), 10, temperature=1e-6)) for one in PROMPTS]
    world = task.plan.mesh.world_size
    target = "echelon.training.inference:generate_rank"
    for rank, found in enumerate(rank_pool.run(target, to_json(task), world)):
        assert list(found.written) == expected
        size = rank_cache_size(task.plan, rank, task.request, [4, 1])
        assert found.cache_bytes == size.num_bytes


FP8 = (
    *("precision.parameters=bf16", "precision.matmul=fp8", "precision.fp8_block=8"),
    *("model.hidden=32", "model.ffn=48"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scales", ["block", "tensor"])
def test_products_in_8_bits_write_alike_under_any_split(
    scales: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    run = trained_run(tmp_path, (*FP8, f"precision.fp8_scales={scales}"))
    task = task_of(run)
    decoder = load_decoder(task.trained, Path(task.checkpoint), task.tokenizer_hash)
    expected = [tuple(continue_tokens(decoder, list(one), 10, temperature=1e-6)) for one in PROMPTS]
    target = "echelon.training.inference:generate_rank"
    for settings in ((), ("mesh.tp=2",), ("mesh.pp=2",)):
        task = task_of(run, *settings)
        for found in rank_pool.run(target, to_json(task), task.plan.mesh.world_size):
            assert list(found.written) == expected, settings


def kinds_read(context: RankContext, argument: Any) -> set[str]:
    """Return which kinds of tensors a rank asks a checkpoint for."""
    asked: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        plan_reads = load._plan_reads

        def noted(path: Path, index: Any, wanted: Mapping[str, Any]) -> Any:
            asked.update(wanted)
            return plan_reads(path, index, wanted)

        patch.setattr(load, "_plan_reads", noted)
        generate_rank(context, argument)
    return asked


def test_the_state_of_the_optimizer_is_not_loaded(run: ec.TrainResult, rank_pool: RankPool) -> None:
    task = task_of(run)
    saved = read_index(Path(task.checkpoint)).tensors
    assert len(saved) > 3
    for asked in rank_pool.run(f"{__name__}:kinds_read", to_json(task), 1):
        assert asked == {"parameters", "router_bias"}


def die_while_writing(context: RankContext, argument: Any) -> RankWriting:
    """Generate, but let rank 1 be killed before its third token."""
    settle = Generator._settle
    calls: list[int] = []

    def killed(self: Generator, *rest: Any) -> bool:
        calls.append(1)
        if context.rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return settle(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "_settle", killed)
        return generate_rank(context, argument)


def test_a_killed_rank_ends_the_run_and_is_named(run: ec.TrainResult) -> None:
    task = task_of(run, "mesh.tp=2")
    outcome = run_ranks(
        f"{__name__}:die_while_writing", to_json(task), world_size=2, labels=("tp0", "tp1")
    )
    with pytest.raises(RunFailed, match=r"rank 1.*SIGKILL"):
        outcome.require()


def stop_at_once(context: RankContext, argument: Any) -> RankWriting:
    """Generate where one rank alone has heard that it should stop."""
    if context.rank == 1:
        context.progress.request_stop()
    return generate_rank(context, argument)


def test_one_rank_that_is_asked_to_stop_stops_all(run: ec.TrainResult, rank_pool: RankPool) -> None:
    task = task_of(run, "mesh.tp=2")
    for found in rank_pool.run(f"{__name__}:stop_at_once", to_json(task), 2):
        assert found.stopped
        assert [len(one) for one in found.written] == [1, 1]
