"""What the ranks said, put together: whole tensors under canonical names, whatever holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from echelon.core.axis import Axis
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.prove.ranks import INITIAL, Piece, RankResult
from echelon.prove.subject import StepRecord

Key = tuple[str, int, str]
"""(kind, step, canonical name)."""


class Observed:
    """Hold the results of all ranks of one plan and answer by canonical name."""

    def __init__(self, plan: Plan, results: Sequence[RankResult]) -> None:
        """Sort the pieces of all ranks by what they are pieces of."""
        self.plan = plan
        self.specs: dict[str, ParameterSpec] = {s.name: s for s in parameters(plan.model)}
        self._reports = [result.reports for result in results]
        self._pieces: dict[Key, list[Piece]] = defaultdict(list)
        for result in results:
            for piece in result.pieces:
                self._pieces[piece.kind, piece.step, piece.name].append(piece)

    @property
    def tells_masters(self) -> bool:
        """Return whether the ranks tell the values that their optimizer keeps."""
        return bool(self.names("masters", INITIAL))

    @property
    def values_kind(self) -> str:
        """Return the kind of the values that the optimizer updates, as far as they are told."""
        return "masters" if self.tells_masters else "parameters"

    def update(self, step: int, name: str) -> torch.Tensor:
        """Return what `step` added to a value, float64."""
        before = self.whole(self.values_kind, step - 1 if step else INITIAL, name)
        return self.whole(self.values_kind, step, name) - before

    def reports(self, step: int) -> list[StepRecord]:
        """Return what each rank said about `step`, in the order of ranks."""
        return [reports[step] for reports in self._reports]

    def names(self, kind: str, step: int) -> set[str]:
        """Return the names that any rank gave, known or not."""
        return {name for k, s, name in self._pieces if (k, s) == (kind, step)}

    def pieces(self, kind: str, step: int, name: str) -> list[Piece]:
        """Return all pieces of a tensor, those of rank 0 first."""
        return self._pieces.get((kind, step, name), [])

    def whole(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return a tensor put together from its primary pieces, float64; NaN where none is."""
        whole = torch.full(self.specs[name].shape, torch.nan, dtype=torch.float64)
        for piece in self.pieces(kind, step, name):
            if piece.primary and self.fits(piece):
                whole[piece.region] = piece.tensor.double()
        return whole

    def fits(self, piece: Piece) -> bool:
        """Return whether a piece is a rectangle of the parameter that it names."""
        shape = self.specs[piece.name].shape
        return piece.global_shape == shape and all(
            part.stop <= size for part, size in zip(piece.region, shape, strict=True)
        )

    def microbatch_losses(self, step: int) -> dict[tuple[int, int], list[tuple[float, int]]]:
        """Return, for each (dp rank, microbatch), what every rank that computed it said.

        Context ranks compute their own positions: what those of one group said is added up.
        """
        said: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        reports = self.reports(step)
        for ranks in self.plan.mesh.groups(Axis.CP):
            slots = dict.fromkeys(slot for r in ranks for slot in reports[r].microbatch_losses)
            for slot in slots:
                parts = [reports[r].microbatch_losses.get(slot, (0.0, 0)) for r in ranks]
                said[slot].append((sum(p[0] for p in parts), sum(p[1] for p in parts)))
        return said

    def coverage_problem(self, kind: str, step: int, name: str) -> str:
        """Return what is wrong with how the pieces cover a tensor, or nothing.

        Every element must have exactly one primary holder; every rectangle must fit.
        """
        shape = self.specs[name].shape
        holders = torch.zeros(shape, dtype=torch.int64)
        for piece in self.pieces(kind, step, name):
            if not self.fits(piece):
                return (
                    f"rank {piece.rank} gives {tuple(piece.tensor.shape)} at {piece.offset} of "
                    f"{piece.global_shape}; the parameter is {shape}"
                )
            if piece.primary:
                holders[piece.region] += 1
        missing, doubled = int((holders == 0).sum()), int((holders > 1).sum())
        if missing:
            return f"{missing} of {holders.numel()} elements have no primary holder"
        if doubled:
            return f"{doubled} of {holders.numel()} elements have more than one primary holder"
        return ""
