"""Ways to run our kernels that are bound by memory, timed: `python -m bench.gpu.variants`.

The update of parameters beside PyTorch's three passes, norms of gradients, sums of rows of experts
beside PyTorch's, and backward kernels of RMSNorm and of rotations in other shapes than
they have. Bytes are the fewest that must move: so GB/s say how near to the memory's bandwidth each
way comes. The way that the engine goes is marked "now"; the median of several turns counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as fn

from bench.gpu.timings import normal
from echelon.core.plan import Optimizer
from echelon.cost.bytes import piece_traffic
from echelon.parallel.kernels import (
    expert_kernels_triton,
    norm_swiglu_triton,
    rotary_triton,
    update_triton,
)
from echelon.training.optimizer.adamw import AdamW
from echelon.training.optimizer.trained_ranges import UpdateSlices, update_elements

Call = Callable[[], object]
Changes = dict[str, Any]
"""Constants of a module, by name."""

RUN = 1 << 24  # elements of a run that the norm adds up at a time
WIDTHS = ((32768, 1024), (16384, 2048), (8192, 4096))  # rows and width of a norm
HEADS = ((32768, 16, 16, 64), (16384, 32, 4, 64), (8192, 32, 8, 128))
"""Tokens, query heads, key heads and width of a head: of 0.4b, 1b and 8b."""
MIXTURES = ((16384, 2, 2048), (16384, 2, 4096), (16384, 8, 7168))
"""Tokens, experts of each, and width of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Name a way to do something, with constants of a module in place of its own."""

    group: str
    name: str
    num_bytes: float
    call: Call
    module: Any = None
    changes: Changes = field(default_factory=dict[str, Any])


def ways(device: torch.device, scale: int = 1) -> Iterator[Way]:
    """Yield all ways, with sizes divided by `scale`."""
    yield from _updates(device, (1 << 27) // scale)
    yield from _norms(device, (1 << 27) // scale)
    for rows, width in WIDTHS:
        yield from _norm_backward(device, max(3, rows // scale), max(16, width // scale))
    for tokens, num_q, num_k, width in HEADS:
        yield from _heads_backward(device, max(1, tokens // scale), (num_q, num_k, width))
    for tokens, top_k, width in MIXTURES:
        yield from _row_sums(device, max(1, tokens // scale), top_k, max(16, width // scale))


def _updates(device: torch.device, elements: int) -> Iterator[Way]:
    group, num_bytes = f"update of {elements:,} parameters by AdamW", 28.0 * elements
    target, mean, square = (torch.zeros(elements, device=device) for _ in range(3))
    gradient, values = (normal(device, elements) for _ in range(2))
    rule = AdamW(Optimizer())
    rule.start_update(1)

    def update(one_pass: bool) -> None:
        slices = UpdateSlices(
            gradient=gradient,
            values=values,
            target=target,
            state=[mean, square],
            scratch=False,
            one_pass=one_pass,
        )
        parts = [(slice(0, elements), True)]
        update_elements(rule, slices, parts, rate=1e-3, factor=1.0, weight_decay=0.1)

    yield Way(group=group, name="PyTorch's passes", num_bytes=num_bytes, call=lambda: update(False))
    for block, warps in ((1024, 4), (512, 4), (2048, 4), (2048, 8), (4096, 8)):
        now = (block, warps) == (update_triton.ELEMENTS, update_triton.WARPS)
        yield Way(
            group=group,
            name=f"one pass, {block} elements, {warps} warps{', now' * now}",
            num_bytes=num_bytes,
            call=lambda: update(True),
            module=update_triton,
            changes={"ELEMENTS": block, "WARPS": warps},
        )


def _norms(device: torch.device, elements: int) -> Iterator[Way]:
    group, gradient = f"norm of {elements:,} gradients", normal(device, elements)
    for name, call in {
        "cast and dot": lambda: [torch.dot(w, w) for w in (r.float() for r in gradient.split(RUN))],
        "vector_norm, now": lambda: [
            torch.linalg.vector_norm(run, dtype=torch.float32) for run in gradient.split(RUN)
        ],
        "vector_norm of all at once": lambda: torch.linalg.vector_norm(
            gradient, dtype=torch.float32
        ),
    }.items():
        yield Way(group=group, name=name, num_bytes=2.0 * elements, call=call)


def _norm_backward(device: torch.device, rows: int, width: int) -> Iterator[Way]:
    group = f"backward of the norm, [{rows} x {width}], with what came around"
    dy, x, around = (normal(device, rows, width) for _ in range(3))
    weight, inverse = normal(device, width), torch.rand(rows, 1, device=device)
    own = (norm_swiglu_triton.TILE_ELEMENTS, norm_swiglu_triton._THREAD_ELEMENTS)
    sums = piece_traffic.MOST_PARTIAL_SUMS
    for tile in (1, 2048, 4096, 8192, 16384):
        for thread in (8, 16, 32):
            for partial in (sums, 2 * sums, 4 * sums):
                now = (tile, thread, partial) == (*own, sums)
                with_sums = patch.object(piece_traffic, "MOST_PARTIAL_SUMS", partial)

                def call(with_sums: Any = with_sums) -> None:
                    with with_sums:
                        norm_swiglu_triton.norm_backward(dy, x, inverse, weight, around)

                yield Way(
                    group=group,
                    name=f"{tile} elements of rows, {thread} of a thread, {partial} programs"
                    f"{', now' * now}",
                    num_bytes=8.0 * rows * width,
                    call=call,
                    module=norm_swiglu_triton,
                    changes={"TILE_ELEMENTS": tile, "_THREAD_ELEMENTS": thread},
                )


def _heads_backward(
    device: torch.device, tokens: int, heads: tuple[int, int, int]
) -> Iterator[Way]:
    num_q, num_k, width = heads
    group = f"backward of rotations, {tokens} tokens, {num_q} and {num_k} heads of {width}"
    counts = (num_q, num_k, num_k)
    parts = [normal(device, tokens, 1, count, width) for count in counts]
    angle = torch.rand((tokens, width // 2), device=device)
    tables = (angle.cos(), angle.sin())
    for block in (256, 512, 1024, 2048, 4096):
        now = block == rotary_triton._BLOCK_ELEMENTS
        yield Way(
            group=group,
            name=f"{block} elements of a program{', now' * now}",
            num_bytes=4.0 * tokens * sum(counts) * width,
            call=lambda: rotary_triton.heads_backward((parts[0], parts[1], parts[2]), tables, None),
            module=rotary_triton,
            changes={"_BLOCK_ELEMENTS": block},
        )


def _row_sums(device: torch.device, tokens: int, top_k: int, width: int) -> Iterator[Way]:
    group = f"sums of {top_k} rows of {width} for each of {tokens} tokens"
    rows, order = normal(device, tokens * top_k, width), torch.randperm(tokens * top_k).to(device)
    starts = torch.arange(0, len(order), top_k, device=device)
    num_bytes = 2.0 * width * tokens * (top_k + 1)
    yield Way(
        group=group,
        name="embedding_bag",
        num_bytes=num_bytes,
        call=lambda: fn.embedding_bag(order, rows, starts, mode="sum"),
    )
    for columns in (512, 1024, 2048, 4096):
        now = columns == expert_kernels_triton.MOST_COLUMNS
        yield Way(
            group=group,
            name=f"{columns} columns of a program{', now' * now}",
            num_bytes=num_bytes,
            call=lambda: expert_kernels_triton.row_sums(rows, order, starts),
            module=expert_kernels_triton,
            changes={"MOST_COLUMNS": columns},
        )


def timed(way: Way, steps: int) -> float:
    """Return the seconds of a call on the GPU, the mean of several in a row."""
    with ExitStack() as stack:
        if way.module is not None:
            stack.enter_context(patch.multiple(way.module, **way.changes))
        way.call()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(steps):
            way.call()
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3 / steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per group; exit 3 where torch sees no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.variants", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="timed calls in a row (10)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the median counts (3)")
    parser.add_argument("--only", default="", help="groups whose titles have this text")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("not run: torch sees no CUDA device", file=sys.stderr)
        return 3
    device, group = torch.device("cuda", 0), ""
    for way in ways(device):
        if options.only not in way.group:
            continue
        if way.group != group:
            group = way.group
            print(f"\n{group}\n\n| way | us | GB/s |\n|---|---|---|")
        try:
            seconds = statistics.median(timed(way, options.steps) for _ in range(options.repeats))
        except Exception as error:
            print(f"| {way.name} | {type(error).__name__}: {str(error).splitlines()[0]} | |")
            continue
        print(f"| {way.name} | {seconds * 1e6:.1f} | {way.num_bytes / seconds / 1e9:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
