"""Where a NaN came from: the rank, the module, the microbatch and its samples."""

from __future__ import annotations

from typing import Any

import torch

from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.subject import ProofBatch
from echelon.training.diagnosis import explain_not_finite
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches

POISONED_TOKEN = 7
SETTINGS = (
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "model.tied=false",
    "batch.sequence_length=8",
    "batch.global_sequences=4",
    "batch.microbatch_sequences=1",
    "mesh.pp=2",
    "mesh.tp=2",
)


def step_with_poison(context: RankContext, argument: dict[str, Any]) -> tuple[bool, str, bool]:
    """Spoil one parameter on one rank, take a step; return what is said and if weights moved."""
    plan = Plan.from_json(argument["plan"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    weights = dict(next(iter(engine.model.stages.values())).named_parameters())
    if context.rank == argument["rank"]:
        weights[argument["name"]].data[argument["row"]] = float("inf")
    before = [bucket.values.clone() for bucket in engine.model.buckets]
    tokens = torch.arange(4 * 8).reshape(4, 8) % 7
    tokens[2, 5] = POISONED_TOKEN
    rows = ProofBatch(sample_ids=(40, 41, 42, 43), inputs_BT=tokens, labels_BT=tokens)
    batches = rank_batches(plan, rows, engine.data_rank, 0)
    result = engine.step(batches, 0)
    error = explain_not_finite(engine, batches, 1, result)
    after = [bucket.values for bucket in engine.model.buckets]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return result.finite, error.problems[0].message, same


def said(pool: RankPool, rank: int, name: str, row: int) -> str:
    """Return the message, which is the same on every rank."""
    plan = load_job("nano", SETTINGS).plan.to_json()
    argument = {"plan": plan, "rank": rank, "name": name, "row": row}
    results = pool.run(f"{__name__}:step_with_poison", argument, 4)
    assert all(not finite and same for finite, _, same in results)
    messages = {message for _, message, _ in results}
    assert len(messages) == 1
    return messages.pop()


def test_the_first_bad_module_is_named(rank_pool: RankPool) -> None:
    message = said(rank_pool, 3, "layers.1.mlp.up.weight", 0)
    assert "microbatch 0 (samples 40), in layers.1.mlp" in message
    assert "(pp1 tp" in message


def test_the_microbatch_and_its_samples_are_named(rank_pool: RankPool) -> None:
    message = said(rank_pool, 0, "embedding.weight", POISONED_TOKEN)
    assert "microbatch 2 (samples 42), in layers.0.attention_norm" in message
    assert "(pp0 tp" in message
