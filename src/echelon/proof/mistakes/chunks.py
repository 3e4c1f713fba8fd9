# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows on a ring of tensor ranks that go wrong, on one device.

A rank multiplies the rows of every tensor rank, chunk by chunk, and adds its part to the sum of
each chunk. What goes to other rows than it is of, or is added more or less often than once, leaves
right numbers elsewhere.

Shape suffixes: N rows of all tensor ranks, I inputs of a layer, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from echelon.core.plan import Plan
from echelon.models.operations import Operations
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.mistakes.forward import Variant

_TIMES = {
    2.0: "the sum that comes to the rank which adds last is added twice",
    0.0: "the sum that comes to the rank which adds last is not added",
}


def chunk_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes in chunks of rows, where a plan has any, the most likely first."""
    if not plan.layout.tp_ring or plan.mesh.cp > 1:
        return
    tp = plan.mesh.tp
    for times, says in _TIMES.items():
        finding = ProofFinding("chunk", f"of a chunk of rows {says}", "tp", value=times)
        yield Variant(finding, _MovedChunks(tp, came=times))
    for by in range(1, tp):
        says = f"the product of a chunk is taken for rows of tensor rank + {by}"
        yield Variant(ProofFinding("rows of a chunk", says, "tp"), _MovedChunks(tp, into=by))


class _MovedChunks(Operations):
    """Let chunks of column layers go into other rows, and what comes of sums count otherwise."""

    def __init__(self, tp: int, *, into: int = 0, came: float = 1.0) -> None:
        """Move products of a rank's rows on by `into` ranks; add what comes `came` times."""
        self.tp, self.into, self.came = tp, into, came

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs, of other rows."""
        made = super().project_in(x_ND, linears)
        return made.roll(self.into * (len(made) // self.tp), dims=0)

    def project_out(self, x_NI: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the sum of what all ranks make, for each chunk the last of them its own part."""
        if self.came == 1.0:
            return super().project_out(x_NI, linear)
        parts_n = x_NI.chunk(self.tp), linear.weight.chunk(self.tp, dim=1)
        own = [
            rows.chunk(self.tp, dim=1)[rank] @ columns.t()
            for rank, (rows, columns) in enumerate(zip(*parts_n, strict=True))
        ]
        bias: torch.Tensor | float = 0.0 if linear.bias is None else linear.bias
        came_ND = x_NI @ linear.weight.t() - torch.cat(own)
        return torch.cat(own) + self.came * came_ND + bias
