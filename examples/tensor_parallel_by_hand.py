"""Tensor parallelism by hand: a toy MLP split over two ranks, every number printed.

    python examples/tensor_parallel_by_hand.py

The MLP has width d = 4 and inner width d_ff = 8: Y = relu(X A) B with 2 x 32 = 64 weights. Each of
two ranks holds half of the columns of A and the matching half of the rows of B: 32 weights. The
two column outputs never meet: relu works on each by itself, and each feeds its own rows of B. What
the ranks then hold are two summands of Y, so one all-reduce forward is all the communication; in
backward the gradients of X are two summands too, and one more all-reduce adds them up.

The layers are those that Echelon trains with (`echelon.parallel.tensor`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from echelon.core.event import EventList
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import BucketPlan
from echelon.parallel.storage.buckets import BucketRule, make_buckets
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.parallel.transport.recorder import Recorder

TARGET = "tensor_parallel_by_hand:one_rank"
"""What the ranks import: they are processes of their own."""

WIDTH, INNER, RANKS = 4, 8, 2
X = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
DY = torch.ones(1, WIDTH)
# Weights are stored [out, in]: A is [8, 4], split by its rows; B is [4, 8], split by its columns.
A = torch.arange(32.0).view(INNER, WIDTH).remainder(5) - 2
B = torch.arange(32.0).view(WIDTH, INNER).remainder(3) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What one rank computed, and what it sent."""

    num_weights: int
    inner: torch.Tensor
    y: torch.Tensor
    dx: torch.Tensor
    da: torch.Tensor
    db: torch.Tensor
    sent: list[str]


def one_device() -> tuple[torch.Tensor, ...]:
    """Return the inner values, Y, and the gradients of X, A and B, on one device."""
    x, a, b = (one.clone().requires_grad_() for one in (X, A, B))
    inner = torch.relu(x @ a.t())
    y = inner @ b.t()
    dx, da, db = torch.autograd.grad(y, (x, a, b), DY)
    return inner.detach(), y.detach(), dx, da, db


def one_rank(context: RankContext, argument: None) -> Steps:
    """Compute the same with this rank's half of the weights."""
    events = EventList()
    recorder = Recorder(context.rank, events)
    ranks = range(context.world_size)
    communicator = Communicator(ranks, dist.group.WORLD)
    group = Group("tp", ranks, context.rank, communicator, recorder)
    half_a = nn.Parameter(A.chunk(RANKS, dim=0)[group.index].clone())
    half_b = nn.Parameter(B.chunk(RANKS, dim=1)[group.index].clone())
    column = nn.Linear(WIDTH, INNER // RANKS, bias=False)
    row = nn.Linear(INNER // RANKS, WIDTH, bias=False)
    column.weight, row.weight = half_a, half_b
    store, gradients = hold({"A": half_a, "B": half_b})
    split = TensorSplit(group=group, sequence_parallel=False, store=store)
    x = X.clone().requires_grad_()
    inner = torch.relu(ColumnLinear.apply(x, [column], split))
    y = RowLinear.apply(inner, row, split)
    y.backward(DY)
    store.run_deferred()
    assert x.grad is not None
    return Steps(
        num_weights=half_a.numel() + half_b.numel(),
        inner=inner.detach(),
        y=y.detach(),
        dx=x.grad,
        da=gradients["A"].clone(),
        db=gradients["B"].clone(),
        sent=[f"{event.kind} {event.name} {event.bytes} bytes" for event in events.events],
    )


def hold(
    parameters: dict[str, nn.Parameter],
) -> tuple[GradientStore, dict[str, torch.Tensor]]:
    """Put parameters into one bucket, where backward leaves their gradients."""
    specs = [ParameterSpec(name=n, shape=tuple(p.shape), layer=0) for n, p in parameters.items()]
    plan = BucketPlan(
        name="bucket0",
        kind="whole",
        names=tuple(parameters),
        num_elements=sum(spec.numel for spec in specs),
    )
    like = next(iter(parameters.values())).detach()
    rule = BucketRule(
        plans=[plan],
        optimizer=Optimizer(),
        counted=dict.fromkeys(parameters, True),
        uses={},
        gradients=like.dtype,
    )
    buckets = make_buckets(parameters, specs, rule, like)
    store = GradientStore(Reduction())
    store.hold(buckets)
    store.start_step()
    store.start_backward(last=True)
    return store, {slot.spec.name: slot.gradient for slot in buckets[0].slots}


def numbers(tensor: torch.Tensor) -> str:
    """Return the values of a row, as whole numbers."""
    return " ".join(f"{value:g}" for value in tensor.flatten().tolist())


def report(ranks: list[Steps]) -> str:
    """Return the story of both computations, side by side."""
    inner, y, dx, da, db = one_device()
    lines = [
        f"one device: {A.numel() + B.numel()} weights",
        f"  X          {numbers(X)}",
        f"  relu(X A)  {numbers(inner)}",
        f"  Y          {numbers(y)}",
        f"  dX         {numbers(dx)}",
    ]
    for index, rank in enumerate(ranks):
        half = slice(index * INNER // RANKS, (index + 1) * INNER // RANKS)
        summand = rank.inner @ B[:, half].t()
        lines += [
            f"rank {index}: {rank.num_weights} weights",
            f"  relu(X A{index}) {numbers(rank.inner)}      its columns of relu(X A)",
            f"  summand    {numbers(summand)}      of Y, before the all-reduce",
            f"  Y          {numbers(rank.y)}",
            f"  dX         {numbers(rank.dx)}",
            *(f"  sent       {sent}" for sent in rank.sent),
        ]
    equal = {
        "inner": torch.equal(torch.cat([rank.inner for rank in ranks], dim=1), inner),
        "Y": all(torch.equal(rank.y, y) for rank in ranks),
        "dX": all(torch.equal(rank.dx, dx) for rank in ranks),
        "dA": torch.equal(torch.cat([rank.da for rank in ranks], dim=0), da),
        "dB": torch.equal(torch.cat([rank.db for rank in ranks], dim=1), db),
    }
    verdicts = (f"{name} {'equal' if same else 'DIFFERENT'}" for name, same in equal.items())
    return "\n".join([*lines, "together: " + ", ".join(verdicts)])


def main() -> None:
    """Start two ranks, and print what they and one device computed."""
    with RankPool(RANKS) as pool:
        print(report(pool.run(TARGET, None, world_size=RANKS)))


if __name__ == "__main__":
    main()
