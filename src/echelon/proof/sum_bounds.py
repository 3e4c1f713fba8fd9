# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients that are rounded on the way: how far off they are, and how far they may be.

With `zero.reduce` ranks round what they send each other, and which numbers share a scale depends on
the layout: no run of one process rounds alike. So a plan is proven with exact sums, as any other,
and then run once more as it is. There every sum is compared, tensor by tensor and number by number,
with the exact sum of what all ranks had of it, beside the bound that follows from their numbers
alone. Of n = l k ranks, l on each of k nodes, rank j of a node adds up slice j of each node. With
X_m the largest number of rank m in a block of the slice, S_a that of the sum of node a,

    e_a   = sum of X_m / (2 L) over the ranks m of node a but the one of place j
    bound = sum of e_a over all nodes + sum of (S_a + e_a) / (2 L) over all nodes but the own one

and L = 127 for int8, 7 for int4: a number is rounded to the nearest multiple of the largest over L.
Nothing is shared with what ranks compute with (`parallel/transport/quantised_sums.py`).

Shape suffixes: n ranks, S numbers of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.parallel.transport.collectives import Group

NUM_STEPS = 2
"""Steps with rounded sums; the second begins with parameters that they have made."""
STEPS_OF_LARGEST = {"int8": 127, "int4": 7}
BLOCK = 128
"""Numbers of a slice that share a scale."""
_ROUNDOFF = 64.0  # of float64, for each number that is added


def with_exact_sums(plan: Plan) -> Plan:
    """Return the plan whose gradients are summed as they are."""
    zero = replace(plan.layout.zero, reduce="exact")
    return replace(plan, layout=replace(plan.layout, zero=zero))


def with_rounded_sums(exact: Plan, plan: Plan) -> list[Plan]:
    """Return `exact` with the sums of `plan`, where these are rounded; else nothing."""
    if plan.layout.zero.reduce == "exact":
        return []
    zero = replace(exact.layout.zero, reduce=plan.layout.zero.reduce)
    return [replace(exact, layout=replace(exact.layout, zero=zero))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumNote:
    """Say how far off one rank's slice of a sum is in one tensor, where it is most of its bound."""

    step: int
    name: str
    error: float
    bound: float


class SumNotes:
    """Compare the sums of a rank as they are made."""

    def __init__(self, plan: Plan) -> None:
        """Look at a plan in float64."""
        self._steps = STEPS_OF_LARGEST.get(plan.layout.zero.reduce, 1)
        self._per_node = plan.cluster.devices_per_node
        self.found: list[SumNote] = []
        self.step = 0

    def see(self, group: Group, bucket: Any, whole: torch.Tensor, total_S: torch.Tensor) -> None:
        """Compare a sum over `group`: what this rank had of it, and the slice that came out.

        Every rank of the group does so together.
        """
        own = bucket.own
        parts_nS = torch.stack(group.gather_objects(whole.detach().cpu()))[:, own].double()
        if not bool(parts_nS.isfinite().all()):
            return
        bound_S = self.bound(group, parts_nS)
        error_S = (total_S.detach().cpu().double() - parts_nS.sum(0)).abs()
        share_S = torch.where(error_S == 0, 0.0, error_S / bound_S)
        for slot in bucket.slots:
            part = bucket.within_own_slice(slice(slot.start, slot.end))
            if part.stop > part.start:
                worst = part.start + int(share_S[part].nan_to_num(torch.inf).argmax())
                self.found.append(
                    SumNote(
                        step=self.step,
                        name=slot.spec.name,
                        error=float(error_S[worst]),
                        bound=float(bound_S[worst]),
                    )
                )

    def bound(self, group: Group, parts_nS: torch.Tensor) -> torch.Tensor:
        """Return how far off each number of this rank's slice may be."""
        node_of = [rank // self._per_node for rank in group.ranks]
        mine = node_of[group.index]
        place = [rank for rank, node in enumerate(node_of) if node == mine].index(group.index)
        bound_S = parts_nS.abs().sum(0) * (_ROUNDOFF * torch.finfo(torch.float64).eps)
        for node in sorted(set(node_of)):
            members = [rank for rank, other in enumerate(node_of) if other == node]
            others = [rank for index, rank in enumerate(members) if index != place]
            off_S = sum((self._half_steps(parts_nS[one].abs()) for one in others), bound_S * 0)
            bound_S = bound_S + off_S
            if node != mine:
                bound_S = bound_S + self._half_steps(parts_nS[members].sum(0).abs() + off_S)
        return bound_S

    def _half_steps(self, largest_S: torch.Tensor) -> torch.Tensor:
        """Return half of what numbers of each block are multiples of, one for each number."""
        found_S = torch.empty_like(largest_S)
        for start in range(0, largest_S.numel(), BLOCK):
            block = slice(start, start + BLOCK)
            found_S[block] = largest_S[block].max() / (2 * self._steps)
        return found_S


def notes_as_json(notes: Sequence[SumNote]) -> list[list[Any]]:
    """Return notes as JSON values."""
    return [[note.step, note.name, note.error, note.bound] for note in notes]


def notes_from_json(values: Sequence[Sequence[Any]]) -> tuple[SumNote, ...]:
    """Return what `notes_as_json` made."""
    return tuple(SumNote(step=s, name=n, error=e, bound=b) for s, n, e, b in values)
