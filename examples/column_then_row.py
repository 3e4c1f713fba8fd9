"""Why an MLP is split by columns first and by rows second, and what the other order costs.

    python examples/column_then_row.py

Y = gelu(X A) B over two ranks, both ways, with the layers that Echelon trains with
(`echelon.parallel.tensor`):

- Column, then row: each rank holds whole columns of X A, gelu works on them as they are, and they
  meet the rows of B that belong to them. The ranks hold summands of Y: one all-reduce forward, one
  backward.
- Row, then column: the ranks hold summands of X A, and gelu of a sum is not a sum of gelus. So the
  sum is made first, on the *inner* width, which is the larger one; and what comes out is columns
  of Y, which must be gathered. Backward does both once more.

Both give the numbers of one device. Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensor_parallel_by_hand import hold
from torch import nn
from torch.nn import functional as fn

from echelon.core.event import Event, EventList
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.parallel.transport.recorder import Recorder

TARGET = "column_then_row:one_rank"
"""What the ranks import: they are processes of their own."""

TOKENS, WIDTH, INNER, RANKS = 16, 32, 128, 2
FIELD = 8  # bytes of a float64
ORDERS = ("column then row", "row then column")

# Not random: the numbers are the same on every machine.
X = torch.arange(TOKENS * WIDTH, dtype=torch.float64).sin().view(TOKENS, WIDTH)
DY = torch.arange(TOKENS * WIDTH, dtype=torch.float64).cos().view(TOKENS, WIDTH)
A = torch.arange(INNER * WIDTH, dtype=torch.float64).mul(0.7).sin().view(INNER, WIDTH) / 4
B = torch.arange(WIDTH * INNER, dtype=torch.float64).mul(0.3).cos().view(WIDTH, INNER) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What one order gave on one rank: the results, and what was sent forward and backward."""

    y: torch.Tensor
    dx: torch.Tensor
    da: torch.Tensor
    db: torch.Tensor
    forward: list[Event]
    backward: list[Event]


class OwnColumns(torch.autograd.Function):
    """Take this rank's columns of what every rank holds; backward gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Return a slice of the columns."""
        ctx.group = group
        return x.chunk(group.size, dim=1)[group.index].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of all columns."""
        return gather_columns(dy, ctx.group, name="input.backward"), None


class AllColumns(torch.autograd.Function):
    """Gather the columns of all ranks; backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
        """Return all columns."""
        ctx.group = group
        return gather_columns(y, group, name="output.forward")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of this rank's columns: every rank holds the same dy."""
        return dy.chunk(ctx.group.size, dim=1)[ctx.group.index].contiguous(), None


def gather_columns(columns: torch.Tensor, group: Group, *, name: str) -> torch.Tensor:
    """Return the columns of all ranks side by side."""
    pieces = columns.new_empty((group.size, *columns.shape))
    group.all_gather(pieces.flatten(0, 1), columns.contiguous(), name=name).wait()
    return pieces.transpose(0, 1).flatten(1)


def one_device() -> tuple[torch.Tensor, ...]:
    """Return Y and the gradients of X, A and B, on one device."""
    x, a, b = (one.clone().requires_grad_() for one in (X, A, B))
    y = fn.gelu(x @ a.t()) @ b.t()
    return y.detach(), *torch.autograd.grad(y, (x, a, b), DY)


def one_rank(context: RankContext, argument: None) -> list[Computed]:
    """Compute both orders on this rank's half of the weights."""
    events = EventList()
    recorder = Recorder(context.rank, events)
    ranks = range(context.world_size)
    communicator = Communicator(ranks, dist.group.WORLD)
    group = Group("tp", ranks, context.rank, communicator, recorder)
    return [compute(order, group, events) for order in ORDERS]


def compute(order: str, group: Group, events: EventList) -> Computed:
    """Run forward and backward of one order."""
    column_first = order == ORDERS[0]
    # Weights are stored [out, in]: split by columns is a split of dim 0, by rows of dim 1.
    dims = (0, 1) if column_first else (1, 0)
    first, second = (half_of(whole, dim, group) for whole, dim in zip((A, B), dims, strict=True))
    store, gradients = hold({"A": first.weight, "B": second.weight})
    split = TensorSplit(group=group, sequence_parallel=False, store=store)
    x = X.clone().requires_grad_()
    start = len(events.events)
    if column_first:
        inner = fn.gelu(ColumnLinear.apply(x, [first], split))
        y = RowLinear.apply(inner, second, split)
    else:
        inner = fn.gelu(RowLinear.apply(OwnColumns.apply(x, group), first, split))
        y = AllColumns.apply(ColumnLinear.apply(inner, [second], split), group)
    middle = len(events.events)
    y.backward(DY)
    store.run_deferred()
    assert x.grad is not None
    return Computed(
        y=y.detach(),
        dx=x.grad,
        da=gradients["A"].clone(),
        db=gradients["B"].clone(),
        forward=events.events[start:middle],
        backward=events.events[middle:],
    )


def half_of(whole: torch.Tensor, dim: int, group: Group) -> nn.Linear:
    """Return a layer that holds this rank's part of a weight."""
    part = whole.chunk(group.size, dim=dim)[group.index].clone()
    layer = nn.Linear(part.shape[1], part.shape[0], bias=False)
    layer.weight = nn.Parameter(part)
    return layer


def formula(order: str) -> int:
    """Return the bytes that a rank sends in one order, by the formulas of `cost.collectives`."""
    outer, inner = TOKENS * WIDTH * FIELD, TOKENS * INNER * FIELD
    if order == ORDERS[0]:
        return 2 * all_reduce_bytes(outer, RANKS)
    return 2 * (all_reduce_bytes(inner, RANKS) + all_gather_bytes(outer // RANKS, RANKS))


def report(ranks: list[list[Computed]]) -> str:
    """Return what both orders sent, and whether they equal one device."""
    lines = [
        f"Y = gelu(X A) B: {TOKENS} tokens, width {WIDTH}, inner width {INNER}, {RANKS} ranks",
        "gelu(summand of rank 0) + gelu(summand of rank 1): " + verdict(*sum_of_gelus()),
    ]
    sent: list[int] = []
    for number, order in enumerate(ORDERS):
        one = [rank[number] for rank in ranks]
        dims = (0, 1) if number == 0 else (1, 0)
        y, dx, da, db = one_device()
        found = {
            "Y": (one[0].y, y),
            "dX": (one[1].dx, dx),
            "dA": (torch.cat([rank.da for rank in one], dim=dims[0]), da),
            "dB": (torch.cat([rank.db for rank in one], dim=dims[1]), db),
        }
        sent.append(sum(event.bytes for event in (*one[0].forward, *one[0].backward)))
        lines += [
            f"{order}:",
            f"  forward    {kinds(one[0].forward)}",
            f"  backward   {kinds(one[0].backward)}",
            f"  each rank  {sent[-1]} bytes sent, {formula(order)} by the formulas",
            "  equality   " + ", ".join(f"{name} {verdict(*pair)}" for name, pair in found.items()),
        ]
    return "\n".join([*lines, f"row then column sends {sent[1] / sent[0]:g} times as much"])


def sum_of_gelus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return what gelu gives of the summands of X A, added up, and what it gives of their sum."""
    halves = zip(X.chunk(RANKS, dim=1), A.chunk(RANKS, dim=1), strict=True)
    summands = [x @ a.t() for x, a in halves]
    return torch.stack([fn.gelu(one) for one in summands]).sum(0), fn.gelu(X @ A.t())


def kinds(events: list[Event]) -> str:
    """Return how often each collective was called."""
    counts = Counter(event.kind for event in events)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def verdict(found: torch.Tensor, right: torch.Tensor) -> str:
    """Return whether two tensors are equal but for the order of sums."""
    return "equal" if torch.allclose(found, right, rtol=1e-12, atol=1e-12) else "DIFFERENT"


def main() -> None:
    """Start two ranks, and print what both orders computed and sent."""
    with RankPool(RANKS) as pool:
        print(report(pool.run(TARGET, None, world_size=RANKS)))


if __name__ == "__main__":
    main()
