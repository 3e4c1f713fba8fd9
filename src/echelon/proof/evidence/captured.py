# SPDX-License-Identifier: Apache-2.0
"""What hooks captured of a program that is not ours, and the one device beside it.

Every rank's parameters before the first step; in each step the gradients of each backward and those
that the optimizer takes, parameters and optimizer state; what passed between modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.parallel.completion.in_flight import Race
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.evidence.run import (
    INITIAL,
    PARAMETERS,
    HeldPart,
    Passed,
    ProgramRun,
    ReferenceStep,
    Tensors,
)

LOCAL = "local"
"""The kind of gradients before reduction; each backward of a step has a number."""

STAND_INS = "stand-ins"
"""The kind of gradients of what a model has in the place of parameters when it updates them."""

SHARDS_PARAMETERS = 3
"""The ZeRO stage from which parameters are shared out; the lower ones share optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalParameters:
    """Hold the parameters of one device by name: shapes, other names of the same, what is frozen.

    `aliases` maps each name of a tied parameter to its first.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    frozen: frozenset[str] = frozenset()

    def canonical(self, name: str) -> str | None:
        """Return the name under which a parameter is compared; None for one that is not there."""
        name = self.aliases.get(name, name)
        return name if name in self.shapes else None

    def elements(self, name: str) -> torch.Tensor:
        """Return the number of each element, in the shape of the parameter."""
        shape = self.shapes[name]
        return torch.arange(math.prod(shape)).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Hold the steps of one device in one precision, the first weights, and what passed in them."""

    logical: LogicalParameters
    initial: Tensors
    steps: tuple[ReferenceStep, ...]
    passed: Passed = field(default_factory=Passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """Hold what a pass is judged by: float64, and the draws of the run's own precision."""

    dtype: str
    exact: Reference
    rough: tuple[Reference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSharding:
    """Say what is to be shared out, by ZeRO stage (3 for FSDP), and who said so.

    `wrapped` says that modules are under FSDP: it may replicate shards (a hybrid sharding), and
    leave modules out that it is told to ignore. `held` is what an engine that gathers tensors to
    show them really keeps of each: bytes, and those of the whole.
    """

    stage: int
    by: str
    wrapped: bool = False
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def kind(self) -> str:
        """Return the captured values that are to be shared out: parameters, or moments."""
        return PARAMETERS if self.stage >= SHARDS_PARAMETERS else "exp_avg"


@dataclass(frozen=True, slots=True)
class HeldCopies:
    """Say what a rank holds of a tensor, and which ranks hold the same of it."""

    rank: int
    num_bytes: int
    ranks: tuple[int, ...]
    num_holders: int

    def problem(self, by: str) -> str:
        """Return what is wrong with it; nothing where no other rank holds the same."""
        others = [str(rank) for rank in self.ranks if rank != self.rank]
        if not others:
            return ""
        shard = -(-self.num_bytes // len(self.ranks))
        so = "so do ranks" if len(others) > 1 else "so does rank"
        return (
            f"rank {self.rank} holds {self.num_bytes} bytes of it, and {so} "
            f"{', '.join(others)}: {by} asks for shards of {shard} bytes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPiece(HeldPart):
    """Hold elements of one parameter of one device that a rank had, flat.

    `kind` is "parameters", "gradients", "local" (before reduction), or a key of optimizer state;
    `call` counts the backward passes of a step. `index` says which elements, `source` the rank's
    own name.
    """

    source: str
    index: torch.Tensor
    call: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)[self.index]

    def put_into(self, whole: torch.Tensor) -> None:
        whole.view(-1)[self.index] = self.tensor.to(whole.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Hold what a step returned: the loss, the norm and the tokens behind it, as far as told."""

    loss: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class LateRank:
    """The races of a rank whose operations completed late, and the number of these."""

    races: tuple[Race, ...]
    num_operations: int


@dataclass(frozen=True, slots=True)
class LateCapture:
    """The races of all ranks, and the number of operations of each."""

    races: tuple[Race, ...]
    num_operations: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RankCapture:
    """Hold all that was captured on one rank in one precision."""

    rank: int
    """The global rank."""
    framework: str = ""
    """The framework that placements were read from."""
    reads_clipped: bool = True
    """Whether gradients were read after clipping."""
    copied_initial: bool = False
    """Whether first weights were given and not drawn."""
    asked: AskedSharding | None = None
    """Parts of the configuration that split the run."""
    passed: Passed = field(default_factory=Passed)
    """Tensors that passed between modules."""
    reports: list[RankReport] = field(default_factory=list[RankReport])
    """The result of each step."""
    late: LateRank | None = None
    """Races of operations that completed late; None without late completion."""
    pieces: list[CapturedPiece] = field(default_factory=list[CapturedPiece])
    """Parameters, gradients and optimizer state by time."""


class CapturedRun(ProgramRun[CapturedPiece]):
    """Hold the captures of all ranks and answer by the names of one device."""

    def __init__(
        self, mesh: NamedMesh, logical: LogicalParameters, captures: Sequence[RankCapture]
    ) -> None:
        """Sort the pieces by what they are of."""
        super().__init__(logical.shapes, (piece for one in captures for piece in one.pieces))
        self.mesh = mesh
        self.captures = captures

    @property
    def reads_clipped(self) -> bool:
        """Return whether the gradients were read after clipping."""
        return all(capture.reads_clipped for capture in self.captures)

    @property
    def copied_initial(self) -> bool:
        """Return whether first weights were given and not drawn."""
        return any(capture.copied_initial for capture in self.captures)

    @property
    def framework(self) -> str:
        """Return what read the values."""
        return ", ".join(dict.fromkeys(capture.framework for capture in self.captures))

    @property
    def asked(self) -> AskedSharding | None:
        """Return what the configuration of the first rank asks to share out."""
        return self.captures[0].asked

    @property
    def late(self) -> LateCapture | None:
        """Return the races of all ranks; None without late completion."""
        ranks = [capture.late for capture in self.captures if capture.late is not None]
        races = tuple(race for rank in ranks for race in rank.races)
        return LateCapture(races, tuple(r.num_operations for r in ranks)) if ranks else None

    def held_copies(self) -> dict[str, HeldCopies]:
        """Return for each tensor that is to be shared out what the first holder has of it."""
        if self.asked is None:
            return {}
        kind = self.asked.kind
        step = INITIAL if kind == PARAMETERS else 0
        found: dict[str, HeldCopies] = {}
        for name in self.shapes:
            pieces = self.parts(kind, step, name)
            if pieces:
                first = pieces[0]
                same = {one.rank for one in pieces if bool((one.index == first.index[0]).any())}
                found[name] = HeldCopies(
                    first.rank,
                    first.tensor.numel() * first.tensor.element_size(),
                    tuple(sorted(same)),
                    len(self.holders(kind, step, name)),
                )
        return found

    def reports(self, step: int) -> list[RankReport]:
        """Return what each rank's step returned."""
        return [
            capture.reports[step] if step < len(capture.reports) else RankReport()
            for capture in self.captures
        ]

    def source(self, name: str, rank: int) -> str:
        """Return the name of a parameter in the program of a rank."""
        pieces = self.parts(PARAMETERS, INITIAL, name)
        return next((piece.source for piece in pieces if piece.rank == rank), name)

    def coverage(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return how many ranks hold each element of a tensor, flat."""
        count = torch.zeros(math.prod(self.shapes[name]), dtype=torch.int64)
        for piece in self.parts(kind, step, name):
            count.index_add_(0, piece.index, torch.ones_like(piece.index))
        return count

    def local_gradients(self, step: int, name: str) -> dict[tuple[int, int], torch.Tensor]:
        """Return what each backward of each rank made, (rank, call) -> whole, zero elsewhere.

        Nothing where a rank that holds the parameter was not seen making any.
        """
        pieces = self.parts(LOCAL, step, name)
        if {piece.rank for piece in pieces} != set(self.holders(PARAMETERS, INITIAL, name)):
            return {}
        found: dict[tuple[int, int], torch.Tensor] = {}
        size = math.prod(self.shapes[name])
        for piece in pieces:
            values = found.setdefault(
                (piece.rank, piece.call), torch.zeros(size, dtype=torch.float64)
            )
            values[piece.index] += piece.tensor.double()
        return found

    def split_axes(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes along which ranks hold different elements of a parameter, and the same ones."""
        held: dict[int, tuple[int, ...]] = {}
        for piece in self.parts(PARAMETERS, INITIAL, name):
            held[piece.rank] = (*held.get(piece.rank, ()), *piece.index.tolist())
        cut, same = [], []
        for axis in self.mesh.axes:
            groups = [self.mesh.group(rank, (axis,)) for rank in held]
            differ = any(held.get(rank) != held.get(group[0]) for group in groups for rank in group)
            (cut if differ else same).append(axis)
        return tuple(cut), tuple(same)

    def place_of(self, name: str) -> str:
        """How a parameter lies on the ranks, as text; "" for a name that is no parameter."""
        holders = self.holders(PARAMETERS, INITIAL, name)
        if not holders:
            return ""
        cut, same = self.split_axes(name)
        texts = [f"split over {' and '.join(cut)}"] if cut else []
        texts += [f"copies over {' and '.join(same)}"] if same else []
        if len(holders) < self.mesh.world_size:
            texts.append(f"ranks {holders}")
        return ", ".join(texts)

    def num_calls(self, step: int) -> int:
        """Return the most backward passes that any rank made in a step."""
        calls = [
            piece.call + 1
            for (kind, when, _), held in self._parts.items()
            if (kind, when) == (LOCAL, step)
            for piece in held
        ]
        return max(calls, default=1)

    def loss(self, step: int) -> float | None:
        """Return the loss of the program: of any rank where all agree, else the mean over ranks.

        The mean counts the tokens behind each, where ranks tell them.
        """
        told = [report for report in self.reports(step) if report.loss is not None]
        if not told:
            return None
        losses = [report.loss for report in told if report.loss is not None]
        weights = [1.0 if report.tokens is None else report.tokens for report in told]
        total = sum(weights)
        return sum(w * x for w, x in zip(weights, losses, strict=True)) / total if total else None
