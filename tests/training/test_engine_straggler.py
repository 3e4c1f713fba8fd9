"""A slow rank is told by the waits of the others (synchronous training goes at its pace)."""

from __future__ import annotations

import time
from typing import Any

import torch

from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.subject import ProofBatch
from echelon.training.engine import TrainEngine
from echelon.training.steps.part import StepResult
from echelon.training.subject import rank_batches

SLEEP_S = 0.5
SETTINGS = (
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=8",
    "batch.global_sequences=4",
    "batch.microbatch_sequences=1",
    "mesh.dp_replicate=4",
)


def step_with_straggler(context: RankContext, argument: dict[str, Any]) -> StepResult:
    """Take a step in which one rank sleeps before its forward pass."""
    plan = Plan.from_json(argument["plan"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    tokens = torch.arange(4 * 8).reshape(4, 8) % 7
    rows = ProofBatch(sample_ids=(0, 1, 2, 3), inputs_BT=tokens, labels_BT=tokens)
    batches = rank_batches(plan, rows, engine.data_rank, 0)
    engine.step(batches, 0)
    if context.rank == argument["slow"]:
        stage = next(iter(engine.model.stages.values()))
        stage.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    return engine.step(batches, 1, used_bytes=context.rank * 10)


def test_the_others_wait_for_the_slow_rank(rank_pool: RankPool) -> None:
    slow = 2
    argument = {"plan": load_job("nano", SETTINGS).plan.to_json(), "slow": slow}
    results = rank_pool.run(f"{__name__}:step_with_straggler", argument, 4)
    for result in results:
        assert result.rank_waits_s == results[0].rank_waits_s
        assert result.rank_used_bytes == (0, 10, 20, 30)
    waits = results[0].rank_waits_s
    assert min(range(4), key=lambda rank: waits[rank]) == slow
    assert all(waits[rank] > SLEEP_S / 2 for rank in range(4) if rank != slow)
