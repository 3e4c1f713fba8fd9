"""What validates and what writes goes by the trained biases, and drops what the rule says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.models.decoder import Decoder
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS, read_index
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.engine import TrainEngine
from echelon.training.whole_run import continue_tokens, load_decoder
from tests.parallel.one_device import make_rows
from tests.training.engine_targets import batches_of
from tests.training.small_runs import checkpoint_of, small_data, small_job, train, whole_state

SETTINGS = (
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=24",
    "model.experts.first_dense_layers=1",
    "experts.balance=bias",
    "experts.bias_rate=0.3",
    "optimizer.learning_rate=0.05",
    "train.steps=7",
    "mesh.dp_shard=2",
    "mesh.ep=2",
)
CAPACITY = "experts.capacity_factor=0.5"


def evaluate(context: RankContext, argument: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Evaluate a batch with the weights of a checkpoint; return what the biases are then."""
    plan, path = Plan.from_json(argument["plan"]), Path(argument["path"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    load_checkpoint(
        path,
        wanted={PARAMETERS: engine.masters(), **engine.parts.tensors()},
        identity=RunIdentity.from_plan(plan, argument["tokenizer"]),
        exchange=engine.groups.world,
    )
    engine.refresh()
    loss = engine.evaluate(batches_of(engine, 0))
    held = engine.parts.tensors()["router_bias"]
    return loss, {name: shards[0].tensor.clone() for name, shards in held.items()}


def loss_of(decoder: Decoder, plan: Plan) -> float:
    """Return the mean loss of the decoder over that batch."""
    batch = replace(make_rows(plan, 0).batch(0), train=False)
    with torch.no_grad():
        return float(decoder(None, batch, scale=1.0 / batch.num_valid()))


@pytest.mark.parametrize("capacity", [(), (CAPACITY,)], ids=["dropless", "capacity"])
def test_ranks_and_one_device_validate_by_the_trained_biases(
    capacity: tuple[str, ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    data = small_data(tmp_path)
    settings = (*SETTINGS, *capacity)
    train(rank_pool, tmp_path / "run", data, settings)
    path, plan = checkpoint_of(tmp_path / "run", 7), small_job(settings).plan
    tokenizer = read_index(path).tokenizer_hash
    argument = {"plan": plan.to_json(), "path": str(path), "tokenizer": tokenizer}
    saved = whole_state(path)["router_bias/layers.1.mlp.router.bias"]
    assert float(saved.abs().max()) >= 0.29
    decoder = load_decoder(plan, path, tokenizer)
    routing = decoder.operations.routing
    assert list(routing.biases) == [1]
    assert torch.equal(routing.biases[1], saved)
    assert routing.balance.capacity_factor is None
    routing.balance = plan.mathematics.balance
    expected = loss_of(decoder, plan)
    for loss, biases in rank_pool.run(f"{__name__}:evaluate", argument, 2):
        assert loss == pytest.approx(expected, rel=2e-6)
        # What is evaluated moves nothing.
        assert torch.equal(biases["layers.1.mlp.router.bias"], saved)
    routing.balance = replace(routing.balance, capacity_factor=None)
    assert (loss_of(decoder, plan) == expected) is not bool(capacity)
    kept, routing.biases = routing.biases, {}
    assert loss_of(decoder, plan) != pytest.approx(expected, rel=2e-6)
    routing.biases = kept


def test_what_is_written_depends_on_the_biases(rank_pool: RankPool, tmp_path: Path) -> None:
    data = small_data(tmp_path)
    train(rank_pool, tmp_path / "run", data, SETTINGS)
    path, plan = checkpoint_of(tmp_path / "run", 7), small_job(SETTINGS).plan
    decoder = load_decoder(plan, path, read_index(path).tokenizer_hash)
    text = continue_tokens(decoder, [10, 20, 30], 24, seed=3)
    assert continue_tokens(decoder, [10, 20, 30], 24, seed=3) == text
    routed = decoder.operations.routing.routed[1]
    assert routed.kept_NK.all()
    decoder.operations.routing.biases = {1: torch.tensor([9.0, 9.0, 0.0, 0.0])}
    continue_tokens(decoder, [10, 20, 30], 24, seed=3)
    assert decoder.operations.routing.routed[1].chosen_NK.max() == 1
