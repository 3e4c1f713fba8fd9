"""Attention over context ranks: what each rank runs in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from echelon.core.attention_mask import DocumentStarts, PositionRun
from echelon.core.axis import Axis
from echelon.core.event import Event, EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext, RankProgress
from echelon.layout.attention_tiles import AttentionTile, tiles_between
from echelon.models.attention import fused, local
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.batch import TokenBatch, positions_of
from echelon.parallel.context import ContextAttention, attention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport import collectives
from echelon.parallel.transport.messages import (
    GlooPeers,
    Messages,
    PendingWorks,
    start_nccl_exchange,
)
from echelon.parallel.transport.recorder import Recorder
from tests.models.attention.flash_reference import ReferenceFlash

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Queries, keys and values of whole sequences, and the gradient of the output.

    q and dout are [T, B, H, hd], k and v [T, B, K, hd].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    documents: DocumentStarts | None = None


Met = tuple[tuple[PositionRun, ...], tuple[PositionRun, ...], tuple[AttentionTile, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What one rank computed at its positions, what it met, and what it wrote down."""

    positions: torch.Tensor
    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor
    forward: list[Event]
    backward: list[Event]
    met_forward: list[Met]
    met_backward: list[Met]


class Waits(RankProgress):
    """Write down when the rank began to wait for others, as events."""

    def __init__(self, events: EventList) -> None:
        super().__init__()
        self.events = events
        self.recorder: Recorder | None = None

    def enter(self, collective: str, turn: int | None = None) -> None:
        if self.recorder is not None:
            self.recorder.record("wait", collective, start=self.recorder.now())

    def leave(self) -> None:
        """Nothing: the event of what was awaited says when that was."""


@contextmanager
def noting(into: list[Met]) -> Iterator[None]:
    """Note everything that attention is asked for inside."""

    def spy(
        queries: tuple[PositionRun, ...], keys: tuple[PositionRun, ...], *rest: Any
    ) -> tuple[AttentionTile, ...]:
        found = tiles_between(queries, keys, *rest)
        into.append((queries, keys, found))
        return found

    with patch.object(attention, "tiles_between", spy):
        yield


def attend(context: RankContext, argument: tuple[Plan, Inputs]) -> Attention:
    """Attend at this rank's positions of whole sequences that are given."""
    plan, inputs = argument
    events = EventList()
    waits = Waits(events)
    recorder = waits.recorder = Recorder(context.rank, events, waits)
    groups = rank_groups(plan, recorder)
    store = GradientStore(Reduction())
    attention = ContextAttention(plan, groups.ring, groups.ulysses, store)
    runs = plan.placement.runs(plan.mesh.coordinates(context.rank)[Axis.CP])
    num_sequences = inputs.q.shape[1]
    tokens = torch.zeros(num_sequences, inputs.q.shape[0], dtype=torch.int64)
    whole = TokenBatch.from_rows(tokens, tokens, torch.arange(num_sequences))
    batch = whole.cut(runs, inputs.documents)
    positions = positions_of(runs, CPU)
    q, k, v = (x[positions].requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    sinks = sinks_of(plan) if plan.model.sinks else None
    dsinks = torch.zeros(plan.model.heads, dtype=torch.float64)

    def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        dsinks.add_(gradient)

    store.add = add
    met_forward: list[Met] = []
    met_backward: list[Met] = []
    with noting(met_forward):
        out = attention.attend(q, k, v, plan.model, batch, sinks_H=sinks).view(q.shape)
    sent = len(events.events)
    with noting(met_backward):
        out.backward(inputs.dout[positions])
    return Attention(
        positions=positions,
        out=out.detach(),
        dq=given(q.grad),
        dk=given(k.grad),
        dv=given(v.grad),
        dsinks=dsinks,
        forward=events.events[:sent],
        backward=events.events[sent:],
        met_forward=met_forward,
        met_backward=met_backward,
    )


def sinks_of(plan: Plan) -> nn.Parameter:
    """Return a sink for each head, some above and some below its scores."""
    return nn.Parameter(torch.linspace(-2.0, 3.0, plan.model.heads, dtype=torch.float64))


def attend_in_batches_of_messages(context: RankContext, argument: tuple[Plan, Inputs]) -> Attention:
    """Attend with the exchanges of NCCL, batches of messages, which Gloo can run too."""

    def batched(sends: Messages, receives: Messages, peers: GlooPeers) -> PendingWorks:
        return start_nccl_exchange(sends, receives, peers.ranks, peers.group)

    with patch.object(collectives, "start_gloo_exchange", batched):
        return attend(context, argument)


def refusals(context: RankContext, plan: Plan) -> list[str]:
    """Offer batches whose positions are not those of this rank; return what is said."""
    groups = rank_groups(plan, Recorder(context.rank, EventList()))
    attention = ContextAttention(
        plan,
        groups.ring,
        groups.ulysses,
        GradientStore(Reduction()),
    )
    runs = plan.placement.runs(plan.mesh.coordinates(context.rank)[Axis.CP])
    found: list[str] = []
    for length in (plan.mathematics.sequence_length * 2, plan.mathematics.sequence_length + 4):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        batch = TokenBatch.from_rows(tokens, tokens, torch.arange(1)).cut(runs)
        q = torch.zeros(batch.num_positions, 1, plan.model.heads, 4)
        k = torch.zeros(batch.num_positions, 1, plan.model.kv_heads, 4)
        try:
            attention.attend(q, k, k, plan.model, batch)
        except ValueError as error:
            found.append(str(error))
    return found


def given(gradient: Any) -> torch.Tensor:
    """Return a gradient that must be there."""
    assert isinstance(gradient, torch.Tensor)
    return gradient


def attend_by_flash(context: RankContext, argument: tuple[Plan, Inputs]) -> Attention:
    """Attend with the calls that a GPU gets, computed by the reference of its kernel."""
    with asked_of_flash():
        return attend(context, argument)


@contextmanager
def asked_of_flash() -> Iterator[ReferenceFlash]:
    """Let all attention inside be calls of flash attention, and the reference compute them."""
    flash = ReferenceFlash()
    with (
        patch.object(local, "kernel_for", lambda *_: FusedGpuKernel(flash)),
        patch.object(fused, "_square", lambda *_: False),
    ):
        yield flash
