"""What attention over context ranks allocates, seen by the allocator itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from echelon.core.axis import Axis
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.context import ContextAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.recorder import Recorder

REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The most bytes that a pass had at a time beside what was there, and what forward left."""

    forward_peak: int
    forward_left: int
    backward_peak: int


def attention_allocates(context: RankContext, plan: Plan) -> Allocated:
    """Run attention of one block forward and backward on given queries, keys and values.

    Threads of Gloo may be the last to let go of a tensor, which the profiler does not see: so the
    least of several runs counts.
    """
    torch.set_num_threads(1)
    runs = [_allocate(context, plan) for _ in range(REPEATS)]
    return Allocated(
        forward_peak=min(one.forward_peak for one in runs),
        forward_left=min(one.forward_left for one in runs),
        backward_peak=min(one.backward_peak for one in runs),
    )


def _allocate(context: RankContext, plan: Plan) -> Allocated:
    """Run once, with groups that have no memory in stock yet."""
    groups = rank_groups(plan, Recorder(context.rank, NoEvents()))
    store = GradientStore(Reduction())
    attention = ContextAttention(plan, groups.ring, groups.ulysses, store)
    batch = _batch(plan, plan.mesh.coordinates(context.rank)[Axis.CP])
    q, k, v = _heads(plan, batch)
    forward = Allocation(lambda: attention.attend(q, k, v, plan.model, batch))
    out = forward.take()
    dout = torch.ones_like(out)
    backward = Allocation(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return Allocated(
        forward_peak=forward.peak, forward_left=forward.left, backward_peak=backward.peak
    )


class Allocation:
    """Follow the allocator of the CPU while a function runs."""

    def __init__(self, run: Callable[[], Any]) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._result = [run()]
        results: Any = profiler.profiler
        events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
        self.peak = self.left = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.peak = max(self.peak, self.left)

    def take(self) -> Any:
        """Return what the function gave, and hold it no more."""
        return self._result.pop()


def _batch(plan: Plan, cp_rank: int) -> TokenBatch:
    sequences, length = plan.layout.microbatch_sequences, plan.mathematics.sequence_length
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    runs = plan.placement.runs(cp_rank)
    return TokenBatch.from_rows(tokens, tokens, torch.arange(sequences)).cut(runs)


def _heads(plan: Plan, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = plan.model
    dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
    shape = (batch.num_positions, batch.num_sequences)

    def made(heads: int) -> torch.Tensor:
        return torch.rand(*shape, heads, model.head_dim, dtype=dtype).requires_grad_()

    return made(model.heads), made(model.kv_heads), made(model.kv_heads)
