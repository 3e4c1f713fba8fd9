"""What ranks run to look at one communication pair at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from echelon.core.event import Event, NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.storage.weights import Shard
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from tests.parallel.buckets import by_hand, matrix
from tests.parallel.targets import build, copies, tensor_group


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """An input, its output, a gradient of the output and what it becomes at the input."""

    x: torch.Tensor
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor


def pair_results(
    context: RankContext, scattered: bool
) -> tuple[PairResult, PairResult, list[Event]]:
    """Run a column and a row layer whose weight is the identity: only communication is left."""
    group, events = tensor_group(context)
    store = GradientStore(Reduction())
    split = TensorSplit(group=group, sequence_parallel=scattered, store=store)
    column, row = (nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
    for one in (column, row):
        one.weight.data.copy_(torch.eye(3))
    weights = {"column": cast(nn.Parameter, column.weight), "row": cast(nn.Parameter, row.weight)}
    store.hold(by_hand(weights, [["column", "row"]]))
    store.start_step()
    store.start_backward(last=True)
    results: list[PairResult] = []
    for index, layer in enumerate((column, row)):
        rows = 12 // group.size if scattered and layer is column else 12
        x = matrix(rows, 3, seed=10 * index + context.rank)
        y: Any
        if layer is column:
            y = ColumnLinear.apply(x, [layer], split)
        else:
            y = RowLinear.apply(x, layer, split)
        dy = matrix(*y.shape, seed=100 + 10 * index + context.rank).detach()
        y.backward(dy)
        assert x.grad is not None
        results.append(PairResult(x=x.detach(), y=y.detach(), dy=dy, dx=x.grad))
    store.run_deferred()
    return results[0], results[1], events.events


GROUPS = (
    "world",
    "data",
    "shard",
    "replicate",
    "stage",
    "tensor",
    "pipe_forward",
    "pipe_backward",
    "tied",
)


def group_members(context: RankContext, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group of this rank, and check that each one works."""
    groups = rank_groups(plan, Recorder(context.rank, NoEvents()))
    members: dict[str, tuple[int, ...]] = {}
    for name in GROUPS:
        group = getattr(groups, name)
        row = group.gather_rows(torch.tensor([context.rank]), name=name)
        assert tuple(row.flatten().tolist()) == group.ranks
        assert group.ranks[group.index] == context.rank
        members[name] = group.ranks
    return members


def first_weights(context: RankContext, plan: Plan) -> dict[str, list[Shard]]:
    """Return the parameters of a rank before the first step."""
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)
    return copies(engine.parameters())


def random_weights(context: RankContext, plan: Plan) -> bool:
    """Return whether parameters look into their buckets, padding zero."""
    built = build(context, plan)
    for bucket in built.model.buckets:
        storage = bucket.values.untyped_storage().data_ptr()
        for slot in bucket.slots:
            assert slot.parameter.untyped_storage().data_ptr() == storage
            assert slot.gradient.shape == slot.parameter.shape
        assert not bucket.values[bucket.slots[-1].end :].any()
    return True
