# SPDX-License-Identifier: Apache-2.0
"""What the ranks said, put together: whole tensors under canonical names, losses, and routes.

Shape suffixes: B sequences of the global batch, T positions, K experts of a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.core.axis import Axis
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.proof.evidence.run import INITIAL, HeldPart, ProgramRun
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.subject import StepRecord

TensorKey = tuple[str, int, str]
"""(kind, step, canonical name)."""


class ObservedRun(ProgramRun[ObservedShard]):
    """Hold the results of all ranks of one plan and answer by canonical name."""

    def __init__(self, plan: Plan, results: Sequence[RankResult]) -> None:
        """Sort the pieces of all ranks by what they are pieces of."""
        self.plan = plan
        self.specs: dict[str, ParameterSpec] = {s.name: s for s in parameters(plan.model)}
        self.trained = {name: one for name, one in self.specs.items() if not one.frozen}
        self._reports = [result.reports for result in results]
        self.activations = [one for result in results for one in result.activations]
        self.sums = [note for result in results for note in result.sums]
        super().__init__(
            {name: spec.shape for name, spec in self.specs.items()},
            (piece for result in results for piece in result.shards),
        )

    @property
    def has_masters(self) -> bool:
        """Return whether the ranks tell the values that their optimizer keeps."""
        return bool(self.names("masters", INITIAL))

    @property
    def value_kinds(self) -> tuple[str, ...]:
        return ("parameters", "masters") if self.has_masters else ("parameters",)

    def reports(self, step: int) -> list[StepRecord]:
        return [reports[step] for reports in self._reports]

    def whole(self, kind: str, step: int, name: str) -> torch.Tensor:
        """Return a tensor put together from its primary pieces, float64; NaN where none is."""
        whole = torch.full(self.shapes[name], torch.nan, dtype=torch.float64)
        for piece in self.parts(kind, step, name):
            if piece.primary and self.fits(piece):
                piece.put_into(whole)
        return whole

    def fits(self, part: HeldPart) -> bool:
        """Return whether a piece is a rectangle of the parameter that it names."""
        assert isinstance(part, ObservedShard), "the parts of a plan's run are rectangles"
        shape = self.shapes[part.name]
        return part.global_shape == shape and all(
            region.stop <= size for region, size in zip(part.region, shape, strict=True)
        )

    def microbatch_losses(self, step: int) -> dict[tuple[int, int], list[tuple[float, int]]]:
        """Return, for each (dp rank, microbatch), what every rank that computed it said.

        Context ranks compute their own positions: what those of one group said is added up.
        """
        reported: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        reports = self.reports(step)
        for ranks in self.plan.mesh.groups(Axis.CP):
            slots = dict.fromkeys(slot for r in ranks for slot in reports[r].microbatch_losses)
            for slot in slots:
                parts = [reports[r].microbatch_losses.get(slot, (0.0, 0)) for r in ranks]
                reported[slot].append((sum(p[0] for p in parts), sum(p[1] for p in parts)))
        return reported

    def coverage_problem(self, kind: str, step: int, name: str) -> str:
        """Return what is wrong with how the pieces cover a tensor, or nothing.

        Every element must have exactly one primary holder; every rectangle must fit.
        """
        shape = self.shapes[name]
        holders = torch.zeros(shape, dtype=torch.int64)
        for piece in self.parts(kind, step, name):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRoutes:
    """Hold where all ranks together sent the tokens through one layer, and who had room.

    `times_BT` counts how often each token was routed, `rank_BT` is who did so last;
    `unknown_tokens` are the numbers of tokens that the batch does not have.
    """

    chosen_BTK: torch.Tensor
    kept_BTK: torch.Tensor
    times_BT: torch.Tensor
    rank_BT: torch.Tensor
    unknown_tokens: Sequence[int]

    @property
    def problem(self) -> str:
        """Return what is wrong with who routed what, or nothing: each token is routed once."""
        never, again = int((self.times_BT == 0).sum()), int((self.times_BT > 1).sum())
        if self.unknown_tokens:
            return f"token {self.unknown_tokens[0]} is routed, and the batch has no such token"
        if never:
            return f"{never} of {self.times_BT.numel()} tokens are routed by no rank"
        if again:
            return f"{again} of {self.times_BT.numel()} tokens are routed more than once"
        return ""


def reports_routes(observed: ObservedRun, step: int) -> bool:
    """Return whether any rank says where it sent tokens."""
    return any(report.routing is not None for report in observed.reports(step))


def routes_of(observed: ObservedRun, step: int, layer: int) -> ObservedRoutes:
    """Return what the ranks did with all tokens of `step` in `layer`."""
    plan = observed.plan
    experts, length = plan.model.experts, plan.mathematics.sequence_length
    assert experts is not None, "only a layer with experts routes"
    rows = {sample: row for row, sample in enumerate(global_batch(plan, step).sample_ids)}
    times_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    rank_BT = torch.zeros_like(times_BT)
    chosen_BTK = torch.zeros(*times_BT.shape, experts.top_k, dtype=torch.int64)
    kept_BTK = torch.zeros_like(chosen_BTK, dtype=torch.bool)
    unknown_tokens: list[int] = []
    said = (
        (rank, route)
        for rank, report in enumerate(observed.reports(step))
        for route in (report.routing.routes if report.routing is not None else ())
        if route.layer == layer
    )
    for rank, route in said:
        for token, chosen, kept in zip(route.tokens, route.chosen, route.kept, strict=True):
            sample, position = divmod(token, length)
            if sample not in rows:
                unknown_tokens.append(token)
                continue
            place = rows[sample], position
            times_BT[place] += 1
            rank_BT[place] = rank
            chosen_BTK[place] = torch.tensor(chosen)
            kept_BTK[place] = torch.tensor(kept)
    return ObservedRoutes(
        chosen_BTK=chosen_BTK,
        kept_BTK=kept_BTK,
        times_BT=times_BT,
        rank_BT=rank_BT,
        unknown_tokens=unknown_tokens,
    )


def routing_from_ranks(observed: ObservedRun, num_steps: int) -> tuple[ForcedRouting, ...] | None:
    """Return where the ranks sent all tokens in all steps; None where they do not say it whole."""
    model = observed.plan.model
    layers = [layer for layer in range(model.layers) if model.layer_has_experts(layer)]
    forced: list[ForcedRouting] = []
    for step in range(num_steps):
        if not layers or not reports_routes(observed, step):
            return None
        routes = {layer: routes_of(observed, step, layer) for layer in layers}
        if any(one.problem for one in routes.values()):
            return None
        forced.append({i: (one.chosen_BTK, one.kept_BTK) for i, one in routes.items()})
    return tuple(forced)
