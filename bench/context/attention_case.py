"""Attention of one block as a case: forward and backward at the positions of one rank.

The first step is never timed. It tells what memory the attention takes and how far its results lie
from those of torch's fused attention over the whole sequence, which the case "whole" writes first.

Shapes: S positions of the sequence, T here, B sequences, H heads, D head_dim.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.context.kinds import EchelonKind, Span, kind_of
from bench.context.resident_memory import allocated_peak, resident_growth
from bench.context.spec import WHOLE, AttentionVariant
from bench.harness.spec import Settings, StepFunction
from bench.peers.plain_context import local

WARM_LENGTH = 256
_BLOCK = 256
_NAMES = ("q", "k", "v", "dout")
_RESULTS = ("out", "dq", "dk", "dv")


class AttentionStep:
    """Take steps of one rank: attention of its queries, and the gradients of q, k and v."""

    def __init__(self, settings: Settings) -> None:
        """Make this rank's part of the inputs."""
        torch.set_num_threads(settings.threads)
        self.settings, self.variant = settings, AttentionVariant.parse(settings.variant)
        self.kind = kind_of(settings, self.variant.kind)
        self.length = settings.size.sequence
        self.positions = self.kind.positions(self.length)
        self.inputs = self._inputs(self.length, self.positions)
        self.steps: list[Span] = []

    def __call__(self, number: int) -> None:
        """Take one step; the first is for facts."""
        if number == 0:
            self._tell_facts()
        else:
            begin = time.perf_counter()
            self.run()
            self.steps.append((str(number), begin, time.perf_counter()))

    def run(self) -> tuple[torch.Tensor, ...]:
        """Return out, dq, dk and dv."""
        return self._attend(self.inputs, self.length)

    def _attend(self, inputs: list[torch.Tensor], length: int) -> tuple[torch.Tensor, ...]:
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
        resident = resident_growth(lambda: results.extend(self.run()))
        facts: dict[str, Any] = {"resident_bytes": resident}
        if self.variant.reference:
            if self.variant.kind == WHOLE:
                self._write_reference()
            facts["errors"] = self._errors(results)
        results.clear()
        facts["allocated_bytes"] = allocated_peak(lambda: results.extend(self.run()))
        facts["position_bytes"] = sum(x.nbytes for x in self.inputs) // len(self.positions)
        self._write("facts", facts)

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

    def write_turn(self) -> None:
        """Write what this rank did since the last reset, and when."""
        turn: dict[str, Any] = {"steps": self.steps, "waits": [], "exchanges": [], "work": []}
        if isinstance(self.kind, EchelonKind):
            zero = self.kind.clock_zero
            turn["waits"] = self.kind.waits.spans
            for event in self.kind.events.events:
                span = (event.name, event.start + zero, event.end + zero)
                turn["work" if event.kind == "attend" else "exchanges"].append(span)
        self._write("turn", turn)

    def reset(self) -> None:
        """Forget what was done so far."""
        self.steps.clear()
        if isinstance(self.kind, EchelonKind):
            self.kind.waits.spans.clear()
            self.kind.events.events.clear()

    def _write(self, name: str, value: dict[str, Any]) -> None:
        rank = torch.distributed.get_rank()
        (Path(self.variant.folder) / f"{name}-{rank}.json").write_text(json.dumps(value))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return AttentionStep(settings)


def recorded_bytes(step: AttentionStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes that Echelon recorded since the last reset; without one, write the turn."""
    if reset:
        step.reset()
        return {}
    step.write_turn()
    return step.kind.events.bytes_by_axis() if isinstance(step.kind, EchelonKind) else {}
