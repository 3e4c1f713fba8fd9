"""Attention over context ranks by each kind, behind one face: Echelon's, and those beside it.

Shapes: T positions here, B sequences, H query and K key/value heads, D head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.harness.plans import bench_plan
from bench.harness.spec import Settings
from bench.peers.llama import join
from bench.peers.plain_context import local, ring, ulysses
from echelon.core.axis import Axis
from echelon.core.event import EventList
from echelon.launch.context import RankProgress
from echelon.models.batch import TokenBatch, positions_of
from echelon.parallel.context import ContextAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")
Span = tuple[str, float, float]
"""A name, and its begin and end on the clock that all processes of a machine share."""


class ContextKindHere(Protocol):
    """Attend at the positions of this rank."""

    heads_first: bool
    """Whether tensors are [B, H, T, D], not [T, B, H, D]."""

    def positions(self, length: int) -> torch.Tensor:
        """Return which positions of a sequence are here, in order."""
        ...

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return causal attention over all ranks, in the shape of q."""
        ...


class Waits(RankProgress):
    """Keep when this rank waited for others, and in what."""

    def __init__(self) -> None:
        """Start with no waits."""
        super().__init__()
        self.spans: list[Span] = []
        self._begun = ("", 0.0)

    def enter(self, collective: str, turn: int | None = None) -> None:
        """Note the start of a wait."""
        del turn
        self._begun = collective, time.perf_counter()

    def leave(self) -> None:
        """Note the end of a wait."""
        name, begin = self._begun
        self.spans.append((name, begin, time.perf_counter()))


class EchelonKind:
    """Echelon's attention, as the engine runs it inside of a block."""

    heads_first = False

    def __init__(self, settings: Settings) -> None:
        """Join the other ranks."""
        rank, _ = join(settings)
        self.plan = bench_plan(settings)
        self.events, self.waits = EventList(), Waits()
        recorder = Recorder(rank, self.events, self.waits)
        self.clock_zero = time.perf_counter() - recorder.now()
        groups = rank_groups(self.plan, recorder)
        self._attention = ContextAttention(
            self.plan,
            groups.ring,
            groups.ulysses,
            GradientStore(Reduction()),
        )
        self._place = self.plan.mesh.coordinates(rank)[Axis.CP]

    def positions(self, length: int) -> torch.Tensor:
        """Return what the placement gives to this rank."""
        return positions_of(replace(self.plan.placement, length=length).runs(self._place), CPU)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return attention of q [T,B,H,D]."""
        tokens = torch.zeros(q.shape[0] * q.shape[1], dtype=torch.int64)
        batch = TokenBatch(
            tokens_N=tokens,
            labels_N=tokens,
            sample_ids_B=torch.arange(q.shape[1]),
            runs=replace(self.plan.placement, length=length).runs(self._place),
            whole_length=length,
        )
        return self._attention.attend(q, k, v, self.plan.model, batch).view(q.shape)


class PlainKind:
    """A function of q, k and v over equal contiguous parts."""

    heads_first = True

    def __init__(self, settings: Settings, function: Callable[..., torch.Tensor]) -> None:
        """Join the other ranks."""
        self._rank, self._world = join(settings)
        self._function = function

    def positions(self, length: int) -> torch.Tensor:
        """Return the part of this rank."""
        size = length // self._world
        return torch.arange(self._rank * size, (self._rank + 1) * size)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return attention of q [B,H,T,D]."""
        del length
        return self._function(q, k, v)


def _torch_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what torch's `context_parallel` makes of SDPA whose inputs are split already."""
    from torch.distributed.tensor.experimental import context_parallel

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(q.shape[2] * world)  # it asks for something to split
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole}):
        grouped = q.shape[1] != k.shape[1]
        # By its full name: what is put in the place of this function is all there is to it.
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )


def kind_of(settings: Settings, kind: str) -> ContextKindHere:
    """Return a kind on this rank."""
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "whole": local,
        "plain-ulysses": ulysses,
        "plain-ring": ring,
        "plain-ring-blocking": partial(ring, blocking=True),
        "torch": _torch_ring,
    }
    if kind in functions:
        return PlainKind(settings, functions[kind])
    return EchelonKind(settings)
