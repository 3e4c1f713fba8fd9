# SPDX-License-Identifier: Apache-2.0
"""What is measured of a machine: shapes, bytes, and the seconds that they took.

`cpu_workload` and `gpu_workload` are what `echelon calibrate` measures: shapes that transformers
are made of, by kind of device. Some sizes of each curve are held out, measured but not fitted: how
far the constants are off there is how far they are off at sizes that nobody measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar, get_args

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Size = TypeVar("Size")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulKernel:
    """Give a matrix product, [rows, depth] x [depth, columns], `batch` of them at once."""

    rows: int
    depth: int
    columns: int
    batch: int = 1

    @property
    def flops(self) -> float:
        """Return its multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.depth * self.columns

    def __str__(self) -> str:
        """Return its shape: ``8 x 64x128x64``."""
        many = f"{self.batch} x " if self.batch > 1 else ""
        return f"{many}{self.rows}x{self.depth}x{self.columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttentionKernel:
    """Give causal self-attention of some sequences, forward or backward, by a fused kernel."""

    sequences: int
    heads: int
    length: int
    head_dim: int
    backward: bool = False

    @property
    def flops(self) -> float:
        """Return the FLOPs of visible pairs, forward; backward are 2.5 times as many."""
        pairs = self.length * (self.length + 1) / 2
        once = 4.0 * self.sequences * self.heads * pairs * self.head_dim
        return 2.5 * once if self.backward else once

    def __str__(self) -> str:
        """Return its shape and direction."""
        way = "backward" if self.backward else "forward"
        return f"{self.sequences} x {self.heads} heads, {self.length}x{self.head_dim} {way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKernel:
    """Give an operator that reads and writes `num_bytes` and computes little: a copy, a norm."""

    name: str
    num_bytes: int

    def __str__(self) -> str:
        """Return its name and size."""
        return f"{self.name} {self.num_bytes / 2**20:.3g} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKernel:
    """Give an operator on so few elements that only its start takes time."""

    name: str

    def __str__(self) -> str:
        """Return its name."""
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKernel:
    """Give an optimizer step over `elements` parameters that moves `num_bytes`."""

    elements: int
    num_bytes: int

    def __str__(self) -> str:
        """Return its size."""
        return f"AdamW of {self.elements:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Give a collective of `degree` ranks, `stride` apart, over `num_bytes`.

    They are what every rank has at the end of an all-gather, or puts into any other. The `stride`
    groups that lie side by side run it at the same time.
    """

    kind: CollectiveKind
    degree: int
    num_bytes: int
    stride: int = 1

    @property
    def num_ranks(self) -> int:
        """Return how many ranks its groups have together: the first ones of all."""
        return self.degree * self.stride

    def __str__(self) -> str:
        """Return its kind, ranks and size."""
        size = self.num_bytes / 1024
        shown = f"{size:g} KiB" if size < 1024 else f"{size / 1024:g} MiB"
        apart = f", {self.stride} apart" if self.stride > 1 else ""
        return f"{self.kind} {self.degree} ranks{apart} {shown}"


MeasuredKernel = MatmulKernel | FusedAttentionKernel | MemoryKernel | LaunchKernel | OptimizerKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """Give the seconds of one kernel on each of `running` ranks that ran it at the same time.

    It is `fitted`, or held out to tell how far the constants are off.
    """

    kernel: MeasuredKernel
    seconds: float
    running: int = 1
    fitted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """Give the seconds of one collective, of its slowest rank; it is `fitted`, or held out."""

    collective: Collective
    seconds: float
    fitted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Say what is measured: kernels of each kind, sizes of collectives, seconds for each."""

    kernels: Sequence[MeasuredKernel]
    """Kernels, in the order in which they are measured."""
    sizes: Sequence[int]
    """Bytes of collectives."""
    window_s: float = 0.1
    """Seconds in which each is run again and again."""
    held_out: frozenset[MeasuredKernel] = frozenset()
    """Kernels that are measured and not fitted."""
    held_out_sizes: frozenset[int] = frozenset()
    """Bytes of the collectives that are measured and not fitted."""

    @property
    def matmuls(self) -> list[MatmulKernel]:
        """Return the matrix products."""
        return [kernel for kernel in self.kernels if isinstance(kernel, MatmulKernel)]


UPDATE_BYTES = 28
"""Bytes that AdamW moves of an fp32 element: it reads 4 values and writes 3."""
MEMORY_OPERATORS = ("copy", "add", "norm", "softmax", "gate")
LAUNCH_OPERATORS = ("add", "product", "norm with gradient")
KIB = 2**10  # bytes
MIB = 2**20  # bytes


def held_out_of(curve: Sequence[Size]) -> Sequence[Size]:
    """Return the sizes of a curve that are not fitted: every third one, and neither of its ends."""
    return curve[1:-1:3]


def cpu_workload(window_s: float) -> Workload:
    """Return what ranks on CPU cores are measured with: some 60 kernels of up to 0.3 GFLOP."""
    # Tokens by what a column-cut or row-cut weight of a small model has left on a rank.
    weights = ((128, 128), (128, 384), (512, 128), (256, 64), (64, 256), (16, 256), (256, 16))
    tall = [[(tokens, *weight) for tokens in (128, 256, 1024)] for weight in weights]
    square = [(n, n, n) for n in (32, 64, 96, 128, 256, 384, 512)]
    odd = [(128, 128, 257), (100, 128, 43), (24, 128, 129)]
    batched = [(128, 32, 128, 8), (128, 128, 32, 8), (256, 64, 256, 4), (64, 64, 64, 16)]
    return _workload(
        window_s,
        matmuls=[square, *tall, odd, batched],
        attention=[(2, 4, 128, 32), (1, 4, 256, 32), (1, 8, 256, 64), (1, 4, 512, 64)],
        moved=(64 * KIB, 1 * MIB, 16 * MIB),
        updated=(2**14, 2**17, 2**20),
    )


def gpu_workload(window_s: float) -> Workload:
    """Return what GPUs are measured with: some 60 kernels of up to 4 TFLOP, messages of 64 MiB."""
    weights = ((4096, 4096), (1024, 4096), (4096, 1024), (512, 8192), (8192, 3584), (128, 4096))
    tall = [[(tokens, *weight) for tokens in (1024, 4096, 8192)] for weight in weights]
    square = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    odd = [(4096, n, n) for n in (1000, 2056, 4160)]
    batched = [(2048, 128, 2048, 32), (2048, 2048, 128, 32), (1024, 4096, 1792, 8)]
    return _workload(
        window_s,
        matmuls=[square, *tall, odd, batched],
        attention=[(1, 32, 2048, 128), (1, 8, 4096, 128), (1, 8, 8192, 128), (4, 16, 1024, 64)],
        moved=(1 * MIB, 64 * MIB, 512 * MIB),
        updated=(2**20, 2**24, 2**27),
    )


def _workload(
    window_s: float,
    *,
    matmuls: Sequence[Sequence[tuple[int, ...]]],
    attention: Sequence[tuple[int, int, int, int]],
    moved: Sequence[int],
    updated: Sequence[int],
) -> Workload:
    """Return kernels of these shapes: products are of (rows, depth, columns), some of a batch."""
    updates = [OptimizerKernel(elements=n, num_bytes=UPDATE_BYTES * n) for n in updated]
    moves = [[MemoryKernel(name=name, num_bytes=n) for n in moved] for name in MEMORY_OPERATORS]
    fused = [
        [
            FusedAttentionKernel(sequences=b, heads=h, length=t, head_dim=e, backward=back)
            for b, h, t, e in attention
        ]
        for back in (False, True)
    ]
    products = [[_product(shape) for shape in curve] for curve in matmuls]
    # Of products there are many curves: a size of every other one is held out.
    curves: list[Sequence[MeasuredKernel]] = [updates, *moves, *fused, *products[::2]]
    sizes = tuple(4**n * KIB for n in range(9))
    launches = [LaunchKernel(name=name) for name in LAUNCH_OPERATORS]
    return Workload(
        kernels=[*launches, *chain(*products), *chain(*fused), *chain(*moves), *updates],
        sizes=sizes,
        window_s=window_s,
        held_out=frozenset(kernel for curve in curves for kernel in held_out_of(curve)),
        held_out_sizes=frozenset(held_out_of(sizes)),
    )


def _product(shape: tuple[int, ...]) -> MatmulKernel:
    rows, depth, columns, *batch = shape
    return MatmulKernel(rows=rows, depth=depth, columns=columns, batch=batch[0] if batch else 1)
