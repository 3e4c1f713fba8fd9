# SPDX-License-Identifier: Apache-2.0
"""What all ranks captured, put together: whole tensors, copies, who holds what."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from echelon.proof.ranks import INITIAL
from echelon.proof.verify.capture import LOCAL, PARAMETERS, CapturedPiece, RankCapture, RankReport
from echelon.proof.verify.named_mesh import NamedMesh
from echelon.proof.verify.placement.located import LogicalParameters
from echelon.proof.verify.sharding import AskedSharding, HeldCopies, kind_of


class SubjectRun:
    """Hold the captures of all ranks and answer by the names of one device."""

    def __init__(
        self, mesh: NamedMesh, logical: LogicalParameters, captures: Sequence[RankCapture]
    ) -> None:
        """Sort the pieces by what they are of."""
        self.mesh = mesh
        self.logical = logical
        self.captures = captures
        self._pieces: dict[tuple[str, int, str], list[tuple[int, CapturedPiece]]] = defaultdict(
            list
        )
        for capture in captures:
            for piece in capture.pieces:
                self._pieces[piece.kind, piece.step, piece.name].append((capture.rank, piece))

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

    def held_copies(self) -> dict[str, HeldCopies]:
        """Return for each tensor that is to be shared out what the first holder has of it."""
        if self.asked is None:
            return {}
        kind = kind_of(self.asked)
        step = INITIAL if kind == PARAMETERS else 0
        found: dict[str, HeldCopies] = {}
        for name in self.logical.shapes:
            pieces = self.pieces(kind, step, name)
            if pieces:
                rank, first = pieces[0]
                same = {
                    other for other, piece in pieces if bool((piece.index == first.index[0]).any())
                }
                found[name] = HeldCopies(
                    rank,
                    first.values.numel() * first.values.element_size(),
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

    def pieces(self, kind: str, step: int, name: str) -> list[tuple[int, CapturedPiece]]:
        """Return who holds which pieces of a tensor, rank 0 first."""
        return self._pieces.get((kind, step, name), [])

    def kinds(self, step: int) -> list[str]:
        """Return the kinds of values that were captured in a step."""
        return list(dict.fromkeys(kind for kind, when, _ in self._pieces if when == step))

    def holders(self, kind: str, step: int, name: str) -> list[int]:
        """Return the ranks that hold any of a tensor."""
        return sorted({rank for rank, _ in self.pieces(kind, step, name)})

    def source(self, name: str, rank: int) -> str:
        """Return the name of a parameter in the program of a rank."""
        pieces = self.pieces(PARAMETERS, INITIAL, name)
        return next((piece.source for holder, piece in pieces if holder == rank), name)

    def whole(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return a tensor, float64: each element from the first rank that has it, NaN from none."""
        shape = self.logical.shapes[name]
        whole = torch.full((math.prod(shape),), torch.nan, dtype=torch.float64)
        for _, piece in reversed(self.pieces(kind, step, name)):
            whole[piece.index] = piece.values.double()
        return whole.reshape(shape)

    def update(self, step: int, name: str) -> torch.Tensor:
        """Return what a step added to a parameter, float64."""
        before = self.whole(PARAMETERS, step - 1 if step else INITIAL, name)
        return self.whole(PARAMETERS, step, name) - before

    def coverage(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return how many ranks hold each element of a tensor, flat."""
        count = torch.zeros(math.prod(self.logical.shapes[name]), dtype=torch.int64)
        for _, piece in self.pieces(kind, step, name):
            count.index_add_(0, piece.index, torch.ones_like(piece.index))
        return count

    def local_gradients(self, step: int, name: str) -> dict[tuple[int, int], torch.Tensor]:
        """Return what each backward of each rank made, (rank, call) -> whole, zero elsewhere.

        Nothing where a rank that holds the parameter was not seen making any.
        """
        pieces = self.pieces(LOCAL, step, name)
        if {rank for rank, _ in pieces} != set(self.holders(PARAMETERS, INITIAL, name)):
            return {}
        found: dict[tuple[int, int], torch.Tensor] = {}
        size = math.prod(self.logical.shapes[name])
        for rank, piece in pieces:
            values = found.setdefault((rank, piece.call), torch.zeros(size, dtype=torch.float64))
            values[piece.index] += piece.values.double()
        return found

    def num_calls(self, step: int) -> int:
        """Return the most backward passes that any rank made in a step."""
        calls = [
            piece.call + 1
            for (kind, when, _), held in self._pieces.items()
            if (kind, when) == (LOCAL, step)
            for _, piece in held
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
