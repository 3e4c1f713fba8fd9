# SPDX-License-Identifier: Apache-2.0
"""Copies of a gradient that differ between ranks and are to be summed: their sum is missing.

Shape suffixes: C copies, E elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.evidence.fits import relative_residual
from echelon.proof.evidence.groups import AxisGroups, group_of


def missing_sums(
    groups_of_axes: AxisGroups, held: Mapping[int, torch.Tensor], right: torch.Tensor, fits: float
) -> Iterator[ProofFinding]:
    """Find axes along which copies differ and add up to the right tensor, or have it as their mean.

    `held` has the copy of each wrong rank, flat, NaN where it has none. Of a tensor that ranks have
    whole, all may use some rows alike and others not: only where copies differ they are summed. An
    explanation leaves less than `fits`, relative.
    """
    first = next(iter(held))
    for axis, groups in groups_of_axes:
        copies = [held[rank] for rank in group_of(groups, first) if rank in held]
        if len(copies) < 2:
            continue
        copies_CE = torch.stack(copies)
        common_E = ~copies_CE.isnan().any(0)
        copies_CE, right_E = copies_CE[:, common_E], right[common_E]
        alike_E = (copies_CE == copies_CE[0]).all(0)
        if not right_E.numel() or bool(alike_E.all()):
            continue
        some = " in some rows" * bool((alike_E & (copies_CE[0] != 0)).any())
        for count, makes in ((1, "add up to"), (len(copies), "have as their mean")):
            total_E = torch.where(alike_E, copies_CE[0], copies_CE.sum(0) / count)
            residual = relative_residual(total_E, right_E)
            if residual < fits:
                says = f"copies differ along {axis}{some} and {makes} the right one: they are not "
                says += f"reduced over {axis}"
                yield ProofFinding("missing sum", says, axis, residual=residual)
