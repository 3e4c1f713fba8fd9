"""What tensor ranks run with the numbers of the lessons: the engine's own layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from echelon.launch.context import RankContext
from echelon.page.lessons.matrices import Matrix
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit
from tests.parallel.buckets import by_hand
from tests.parallel.targets import tensor_group

Numbers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNumbers:
    """Say what the layers of all ranks get: inputs and weights [in, out], a rank each."""

    column_x: Matrix
    columns: Sequence[Matrix]
    row_x: Sequence[Matrix]
    rows: Sequence[Matrix]
    mlp_x: Matrix
    first: Sequence[Matrix]
    second: Sequence[Matrix]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResults:
    """What one rank computed, and what it sent: kind, name, bytes."""

    column: Numbers
    gathered: Numbers
    row: Numbers
    mlp: Numbers
    events: list[tuple[str, str, int]]


def run_layers(context: RankContext, given: LayerNumbers) -> LayerResults:
    """Run a column layer and gather it, a row layer, and an MLP of both, forward."""
    group, events = tensor_group(context)
    rank, n = group.index, group.size
    split = TensorSplit(group=group, sequence_parallel=False, store=GradientStore(Reduction()))
    layers = [_layer(one[rank]) for one in (given.columns, given.rows, given.first, given.second)]
    names = ["column", "row", "first", "second"]
    held = {name: cast(nn.Parameter, one.weight) for name, one in zip(names, layers, strict=True)}
    split.store.hold(by_hand(held, [names]))
    column, row, first, second = layers
    y: Any = ColumnLinear.apply(_tensor(given.column_x), [column], split)
    parts = y.new_empty(n * len(y), y.shape[1])
    group.all_gather(parts, y.detach().contiguous(), name="gather").wait()
    gathered = torch.cat(parts.chunk(n), dim=1)
    summed: Any = RowLinear.apply(_tensor(given.row_x[rank]), row, split)
    inner: Any = ColumnLinear.apply(_tensor(given.mlp_x), [first], split)
    out: Any = RowLinear.apply(inner.clamp(min=0), second, split)
    return LayerResults(
        column=_plain(y),
        gathered=_plain(gathered),
        row=_plain(summed),
        mlp=_plain(out),
        events=[(one.kind, one.name, one.bytes) for one in events.events],
    )


def _layer(weight_IO: Matrix) -> nn.Linear:
    weight = _tensor(weight_IO).t()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    return layer


def _tensor(matrix: Matrix) -> torch.Tensor:
    return torch.tensor(matrix, dtype=torch.float64)


def _plain(tensor: torch.Tensor) -> Numbers:
    return tuple(tuple(int(x) for x in row) for row in tensor.tolist())
