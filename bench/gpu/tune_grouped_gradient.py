"""Which tile is best for the gradients of all experts: `python -m bench.gpu.tune_grouped_gradient`.

The kernel of `expert_kernels_triton.py` with several tiles, beside one product after the other
and PyTorch's grouped product, which gives bf16 only. Each is asked for three ways: added to sums in
float32, over old ones in float32, over old ones in bf16. Each is checked first, of experts with
uneven rows; the exit is 1 where one is wrong. The variants of a column take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.storage.matmul import add_product

TILES = (
    (128, 128, 64, 8, 3, 8),
    (128, 128, 64, 8, 4, 8),
    (128, 128, 64, 4, 3, 8),
    (128, 128, 64, 4, 4, 8),
    (128, 128, 32, 8, 4, 8),
    (128, 128, 64, 8, 3, 16),
    (128, 256, 64, 8, 3, 8),
    (128, 256, 64, 8, 4, 8),
    (256, 128, 64, 8, 3, 8),
    (256, 128, 64, 8, 4, 8),
)
"""Outputs, inputs, rows, warps, stages, tiles down: see `GradientTile`. The first is taken."""

WAYS = (
    ("adds, float32", torch.float32, False),
    ("overwrites, float32", torch.float32, True),
    ("overwrites, bf16", torch.bfloat16, True),
)
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""The largest error, of the largest element: sums in another order, and one rounding to bf16."""

WRONG = "WRONG"


class NotOffered(Exception):
    """PyTorch has no such product: its grouped one makes new matrices in bf16, and adds none up."""


Add = Callable[["Operands", bool], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Hold sums, the rows of both sides, how many each expert has, and where they end."""

    sum_EOI: torch.Tensor
    dy_RO: torch.Tensor
    x_RI: torch.Tensor
    counts: Sequence[int]
    ends_E: torch.Tensor

    @classmethod
    def drawn(cls, counts: Sequence[int], widths: tuple[int, int], dtype: torch.dtype) -> Operands:
        """Return operands with these rows and widths."""
        rows, device = sum(counts), torch.device("cuda")
        dy, x = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for n in widths)
        return cls(
            sum_EOI=torch.ones(len(counts), *widths, device=device, dtype=dtype),
            dy_RO=dy,
            x_RI=x,
            counts=counts,
            ends_E=torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device),
        )


def variants() -> Iterator[tuple[str, Add]]:
    """Yield what is compared, by name."""
    yield "one after the other", _one_by_one
    yield "PyTorch's grouped product alone", _grouped
    yield "PyTorch's grouped product, zeros, copied", _grouped_and_copied
    kernels: Any = import_module("echelon.parallel.kernels.expert_kernels_triton")
    for given in TILES:
        outputs, inputs, rows, warps, stages, down = given
        tile = kernels.GradientTile(
            outputs=outputs,
            inputs=inputs,
            rows=rows,
            warps=warps,
            stages=stages,
            tiles_down=down,
        )

        def add(of: Operands, fresh: bool, tile: Any = tile) -> None:
            kernels.add_grouped_gradient(
                of.sum_EOI, of.dy_RO, of.x_RI, of.ends_E, fresh=fresh, tile=tile
            )

        yield f"{outputs} x {inputs} x {rows}, {warps} warps, {stages} stages, {down} down", add


def _one_by_one(of: Operands, fresh: bool) -> None:
    parts = (one.split(list(of.counts)) for one in (of.dy_RO, of.x_RI))
    for sum_OI, dy, x in zip(of.sum_EOI, *parts, strict=True):
        add_product(sum_OI, dy, x, fresh=fresh, num_rows=TRAINING_PIECES.product_rows)


def _grouped(of: Operands, fresh: bool) -> None:
    if 0 in of.counts:  # of which it promises nothing
        _grouped_and_copied(of, fresh)
    else:
        _product(of, fresh)


def _grouped_and_copied(of: Operands, fresh: bool) -> None:
    made_EOI = _product(of, fresh)
    empty_E = of.ends_E.diff(prepend=of.ends_E.new_zeros(1)) == 0
    of.sum_EOI.copy_(made_EOI.masked_fill_(empty_E[:, None, None], 0))


def _product(of: Operands, fresh: bool) -> torch.Tensor:
    if of.sum_EOI.dtype != torch.bfloat16 or not fresh:
        raise NotOffered
    products: Any = torch
    return products._grouped_mm(of.dy_RO.t(), of.x_RI, offs=of.ends_E)


def error_of(add: Add, dtype: torch.dtype, fresh: bool) -> float:
    """Return how far a variant is from products one after the other, over the largest element."""
    torch.manual_seed(3)
    of = Operands.drawn((300, 0, 129, 1000, 64), (1408, 520), dtype)
    wanted = (
        torch.zeros(of.sum_EOI.shape, device=of.sum_EOI.device) if fresh else of.sum_EOI.clone()
    )
    parts = (one.float().split(list(of.counts)) for one in (of.dy_RO, of.x_RI))
    for sum_OI, dy, x in zip(wanted, *parts, strict=True):
        sum_OI.add_((dy.double().t() @ x.double()).float())
    add(of, fresh)
    error = (of.sum_EOI.float() - wanted).abs().max() / wanted.abs().max()
    return float(error.nan_to_num(torch.inf))


def _microseconds(add: Add, of: Operands, fresh: bool, steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        add(of, fresh)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per size; exit 1 where a variant is wrong, 3 where torch sees no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.tune_grouped_gradient", description=__doc__
    )
    add = parser.add_argument
    sizes = "32768x2816x2048,32768x28672x4096"
    add("--sizes", default=sizes, help="ROWSxOUTPUTSxINPUTS (%(default)s)")
    add("--experts", type=int, default=8, help="experts (8)")
    add("--steps", type=int, default=5, help="timed calls in a row (5)")
    add("--repeats", type=int, default=3, help="turns of every variant; the median counts (3)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("not run: torch sees no CUDA device", file=sys.stderr)
        return 3
    made = dict(variants())
    checked = {way: _checked(made, *way[1:]) for way in WAYS}
    for text in options.sizes.split(","):
        rows, outputs, inputs = map(int, text.split("x"))
        counts = [rows // options.experts] * options.experts
        columns = []
        for way in WAYS:
            of = Operands.drawn(counts, (outputs, inputs), way[1])
            right = {name: made[name] for name, said in checked[way].items() if not said}
            columns.append(checked[way] | _timed(right, of, way[2], options))
            del of
        print(f"{text}, {options.experts} experts: us, TFLOP/s\n")
        print(f"| variant | {' | '.join(name for name, *_ in WAYS)} |")
        print("|---|---|---|---|")
        for name in made:
            print(f"| {name} | {' | '.join(column[name] for column in columns)} |")
        print(flush=True)
    return int(any(said.startswith(WRONG) for one in checked.values() for said in one.values()))


def _checked(made: dict[str, Add], dtype: torch.dtype, fresh: bool) -> dict[str, str]:
    """Return what is wrong with each variant; nothing with one that may be timed."""
    told: dict[str, str] = {}
    for name, add in made.items():
        try:
            error = error_of(add, dtype, fresh)
        except NotOffered:
            told[name] = "-"
        except Exception as failure:  # a tile that a device cannot take is a row, not the end
            told[name] = str(failure).strip().splitlines()[0][:60].replace("|", "/")
        else:
            told[name] = "" if error <= ERRORS[dtype] else f"{WRONG} by {error:.0e}"
    return told


def _timed(
    right: dict[str, Add], of: Operands, fresh: bool, options: argparse.Namespace
) -> dict[str, str]:
    taken: dict[str, list[float]] = {name: [] for name in right}
    for turn in range(options.repeats + 1):
        for name, add in right.items():
            found = _microseconds(add, of, fresh, options.steps if turn else 1)
            taken[name] += [found] * (turn > 0)
    work = 2e-6 * len(of.dy_RO) * of.dy_RO.shape[1] * of.x_RI.shape[1]
    middles = {name: statistics.median(times) for name, times in taken.items()}
    return {name: f"{middle:.0f} us, {work / middle:.0f}" for name, middle in middles.items()}


if __name__ == "__main__":
    sys.exit(main())
