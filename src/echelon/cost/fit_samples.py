"""What is measured of a machine: shapes, bytes, and the seconds that they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
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
class Attention:
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
class Move:
    """Give an operator that reads and writes `num_bytes` and computes little: a copy, a norm."""

    name: str
    num_bytes: int

    def __str__(self) -> str:
        """Return its name and size."""
        return f"{self.name} {self.num_bytes / 2**20:.3g} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Give an operator on so few elements that only its start takes time."""

    name: str

    def __str__(self) -> str:
        """Return its name."""
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Give an optimizer step over `elements` parameters that moves `num_bytes`."""

    elements: int
    num_bytes: int

    def __str__(self) -> str:
        """Return its size."""
        return f"AdamW of {self.elements:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Give a collective of `degree` ranks over `num_bytes`.

    They are what every rank has at the end of an all-gather, or puts into any other.
    """

    kind: CollectiveKind
    degree: int
    num_bytes: int

    def __str__(self) -> str:
        """Return its kind, ranks and size."""
        size = self.num_bytes / 1024
        shown = f"{size:g} KiB" if size < 1024 else f"{size / 1024:g} MiB"
        return f"{self.kind} {self.degree} ranks {shown}"


Kernel = Product | Attention | Move | Dispatch | Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Give the seconds of one kernel on each of `running` ranks that ran it at the same time."""

    kernel: Kernel
    seconds: float
    running: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """Give the seconds of one collective, of its slowest rank."""

    collective: Collective
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Say what is measured: kernels of each kind, sizes of collectives, seconds for each."""

    products: Sequence[Product]
    attention: Sequence[Attention]
    moves: Sequence[Move]
    updates: Sequence[Update]
    dispatches: Sequence[Dispatch]
    sizes: Sequence[int]
    window_s: float = 0.1

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Return all kernels, in the order in which they are measured."""
        parts = (self.dispatches, self.products, self.attention, self.moves, self.updates)
        return tuple(kernel for part in parts for kernel in part)
