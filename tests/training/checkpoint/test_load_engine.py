"""The engine's own state goes through checkpoints of any layout and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import read_index
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint
from echelon.training.engine import TrainEngine
from tests.parallel.layouts import GPT2, NANO, plan_of
from tests.training.checkpoint.ranks import Tensors, assert_same

SEQUENCES = 8


def pass_through(context: RankContext, argument: Any) -> None:
    """Load a checkpoint where there is one, else make up a state, and save it."""
    plan = Plan.from_json(argument["plan"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    state = {f"optimizer.{kind}": shards for kind, shards in engine.state().items()}
    held = {"parameters": engine.parameters(), **state}
    exchange = engine.groups.world
    identity = RunIdentity.from_plan(plan, "bytes")
    if argument["source"]:
        path = Path(argument["source"])
        load_checkpoint(path, wanted=held, identity=identity, exchange=exchange)
    else:
        for shards in state.values():
            for pieces in shards.values():
                for shard in pieces:
                    # A value of its own for every element, whatever holds it.
                    steps = torch.arange(shard.tensor.numel()).reshape(shard.tensor.shape)
                    shard.tensor.copy_(steps / 7 + sum(shard.offset) * 1000)
    save_checkpoint(
        Path(argument["directory"]),
        Snapshot(step=1, state={}, shards=held),
        identity=identity,
        exchange=exchange,
    )


def _plan(layout: dict[str, Any], model: Any) -> Plan:
    ranks = layout.get("dp", 1) * layout.get("dp_shard", 1)
    return plan_of(model=model, dtype="fp32", microbatches=SEQUENCES // ranks, **layout)


def _whole(path: Path, plan: Plan) -> Tensors:
    """Return the whole tensors of a checkpoint."""
    tensors = {
        kind: {name: torch.zeros(entry.shape) for name, entry in entries.items()}
        for kind, entries in read_index(path).tensors.items()
    }
    wanted = {
        kind: {
            name: [
                Shard(
                    name=name,
                    global_shape=tuple(tensor.shape),
                    offset=(0,) * tensor.ndim,
                    tensor=tensor,
                    primary=False,
                )
            ]
            for name, tensor in by_name.items()
        }
        for kind, by_name in tensors.items()
    }
    identity = RunIdentity.from_plan(plan, "bytes")
    load_checkpoint(path, wanted=wanted, identity=identity, exchange=SingleRankCommunicator())
    return tensors


@pytest.mark.quick("untied")
@pytest.mark.parametrize("model", [NANO, GPT2], ids=["untied", "tied"])
def test_a_state_goes_through_every_layout_unchanged(
    rank_pool: RankPool, tmp_path: Path, model: Any
) -> None:
    layouts: list[dict[str, Any]] = [
        {"tp": 2, "pp": 2},
        {"dp": 2, "tp": 2, "sequence_parallel": True},
        {"pp": 4},
        {"tp": 4 if model.kv_heads % 4 == 0 else 2, "bucket_bytes": 256},
        {},
        {"dp_shard": 2, "tp": 2, "zero": Zero(stage=3, accumulate="slices")},
        {"dp": 2, "dp_shard": 2, "zero": Zero(stage=1)},
        {"dp": 4},
    ]
    source, first = "", None
    for number, layout in enumerate(layouts):
        plan = _plan(layout, model)
        directory = tmp_path / str(number)
        argument = {"plan": plan.to_json(), "source": source, "directory": str(directory)}
        rank_pool.run(f"{__name__}:pass_through", argument, plan.mesh.world_size)
        source = str(directory / "step-000001")
        tensors = _whole(Path(source), plan)
        first = first or tensors
        assert set(tensors) == {"parameters", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
        assert tensors["optimizer.exp_avg"]["embedding.weight"].unique().numel() > 100
        assert_same(tensors, first)
