"""Attention of one block as a case: forward and backward at the positions of one rank, by any kind.

The first step is never timed. It tells what memory the attention takes and how far its results lie
from those of torch's fused attention over the whole sequence, which the case "whole" writes first.

Shapes: S positions of the sequence, T here, B sequences, H query and K key/value heads, D head_dim.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from bench.context.spec import WHOLE, AttentionVariant
from bench.harness.plans import bench_plan
from bench.harness.rank import reset_peak, status_bytes
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join
from bench.peers.plain_context import local, ring, ulysses
from echelon.core.axis import Axis
from echelon.core.event import EventList
from echelon.models.batch import TokenBatch, positions_of
from echelon.parallel.context import ContextAttention
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.recorder import Recorder

CPU = torch.device("cpu")
WARM_LENGTH = 256
_BLOCK = 256
_NAMES = ("q", "k", "v", "dout")
_RESULTS = ("out", "dq", "dk", "dv")


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


class EchelonKind:
    """Echelon's attention, as the engine runs it inside of a block."""

    heads_first = False

    def __init__(self, settings: Settings) -> None:
        """Join the other ranks."""
        rank, _ = join(settings)
        self.plan = bench_plan(settings)
        self.events = EventList()
        groups = rank_groups(self.plan, Recorder(rank, self.events))
        store = GradientStore(Reduction())
        self._attention = ContextAttention(self.plan, groups.ring, groups.ulysses, store)
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


_PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "whole": local,
    "plain-ulysses": ulysses,
    "plain-ring": ring,
    "plain-ring-blocking": partial(ring, blocking=True),
    "torch": _torch_ring,
}


class AttentionStep:
    """Take steps of one rank: attention of its queries, and the gradients of q, k and v."""

    def __init__(self, settings: Settings) -> None:
        """Make this rank's part of the inputs."""
        torch.set_num_threads(settings.threads)
        self.settings, self.variant = settings, AttentionVariant.parse(settings.variant)
        plain = _PLAIN.get(self.variant.kind)
        self.kind: ContextKindHere = (
            EchelonKind(settings) if plain is None else PlainKind(settings, plain)
        )
        self.length = settings.size.sequence
        self.positions = self.kind.positions(self.length)
        self.inputs = self._inputs(self.length, self.positions)

    def __call__(self, number: int) -> None:
        """Take one step; the first is for facts."""
        if number == 0:
            self._tell_facts()
        else:
            self._attend(self.inputs, self.length)

    def _attend(self, inputs: list[torch.Tensor], length: int) -> tuple[torch.Tensor, ...]:
        """Return out, dq, dk and dv."""
        q, k, v, dout = inputs
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.kind.attend(leaves[0], leaves[1], leaves[2], length)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def _inputs(self, length: int, positions_T: torch.Tensor) -> list[torch.Tensor]:
        """Return q, k, v and the gradient of the output: the same values in every case."""
        size = self.settings.size
        found: list[torch.Tensor] = []
        for index, name in enumerate(_NAMES):
            heads = size.kv_heads if name in "kv" else size.heads
            shape = (size.global_sequences, heads, size.hidden // size.heads)
            rows = torch.empty(len(positions_T), *shape)
            for start in range(0, length, _BLOCK):
                here = ((positions_T >= start) & (positions_T < start + _BLOCK)).nonzero()[:, 0]
                if len(here):
                    generator = torch.Generator().manual_seed(index + 4 * start)
                    block = torch.randn(_BLOCK, *shape, generator=generator)
                    rows[here] = block[positions_T[here] - start]
            rows = rows.to(getattr(torch, self.variant.dtype))
            found.append(rows.permute(1, 2, 0, 3).contiguous() if self.kind.heads_first else rows)
        return found

    def _tell_facts(self) -> None:
        """Run once for every fact, and write them."""
        warm = self._inputs(WARM_LENGTH, self.kind.positions(WARM_LENGTH))
        self._attend(warm, WARM_LENGTH)  # connections, code and buffers that are made once
        results: list[torch.Tensor] = []

        def run() -> None:
            results.extend(self._attend(self.inputs, self.length))

        facts: dict[str, Any] = {"resident_bytes": resident_growth(run)}
        if self.variant.reference:
            if self.variant.kind == WHOLE:
                self._write_reference()
            facts["errors"] = self._errors(results)
        results.clear()
        facts["allocated_bytes"] = allocated_peak(run)
        path = Path(self.variant.folder) / f"facts-{dist.get_rank()}.json"
        path.write_text(json.dumps(facts))

    def _write_reference(self) -> None:
        """Write what the fused kernel makes of the whole sequence, in fp32 at least."""
        wide = [x if x.dtype == torch.float64 else x.float() for x in self.inputs]
        q, k, v = (x.detach().requires_grad_() for x in wide[:3])
        out = local(q, k, v)
        found = (out.detach(), *torch.autograd.grad(out, (q, k, v), wide[3]))
        for name, value in zip(_RESULTS, found, strict=True):
            whole = self._reference(name, value.shape[1], value.dtype)
            whole.copy_(value.permute(2, 0, 1, 3))

    def _reference(self, name: str, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the reference values [S, B, H, D], which are in a file."""
        size = self.settings.size
        shape = (self.length, size.global_sequences, heads, size.hidden // size.heads)
        count = torch.Size(shape).numel()
        path = Path(self.variant.reference) / f"{name}.bin"
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)

    def _errors(self, results: list[torch.Tensor]) -> dict[str, float]:
        """Return the largest difference per result, over the largest value of the reference."""
        wide = torch.float64 if self.variant.dtype == "float64" else torch.float32
        errors: dict[str, float] = {}
        for name, value in zip(_RESULTS, results, strict=True):
            mine = value.permute(2, 0, 1, 3) if self.kind.heads_first else value
            whole = self._reference(name, mine.shape[2], wide)
            largest = max(float(part.abs().max()) for part in whole.split(_BLOCK))
            furthest = max(
                float((rows - whole[at]).abs().max())
                for rows, at in zip(mine.split(_BLOCK), self.positions.split(_BLOCK), strict=True)
            )
            errors[name] = furthest / largest
        return errors


def allocated_peak(run: Callable[[], None]) -> int:
    """Return the most bytes that tensors made inside of `run` held at a time, on CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def resident_growth(run: Callable[[], None]) -> int:
    """Return how far the resident memory of this process rose above its start while `run` ran."""
    gc.collect()
    reset_peak()
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return AttentionStep(settings)


def recorded_bytes(step: AttentionStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes that Echelon recorded since the last reset."""
    if not isinstance(step.kind, EchelonKind):
        return {}
    if reset:
        step.kind.events.events.clear()
    return step.kind.events.bytes_by_axis()
