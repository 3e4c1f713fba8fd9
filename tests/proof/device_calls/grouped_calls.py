"""Bugs in what grouped products of a GPU are told; plain products compute what they say.

Each engine here has experts whose rows its host never counts, on ranks of a CPU.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.expert import grouped_matmul, layer, token_dispatcher
from echelon.parallel.expert.grouped_matmul import ends_of
from tests.proof.mutants.expert_layouts import FIRST, in_routes
from tests.proof.mutants.planting import mutant


def grouped(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Return products as PyTorch's `_grouped_mm` does; what is in no group is not a number."""
    assert offs.dtype == torch.int32
    parts = [slice(start, end) for start, end in pairwise([0, *offs.tolist()])]
    made = a.new_full((len(a), b.shape[-1]), torch.nan)
    for part, matrix in zip(parts, b, strict=True):
        made[part] = a[part] @ matrix
    return made


def uncounted(patch: pytest.MonkeyPatch) -> None:
    """Let experts take rows that only the device counts, wherever nothing is sent."""
    needs = grouped_matmul.needs_no_counts

    def asked(*given: Any) -> bool:
        assert needs(*given), "matrices lie equally far apart in these plans"
        return True

    patch.setattr(grouped_matmul, "has_grouped_kernel", lambda _: True)
    patch.setattr(grouped_matmul, "_GROUPED_MM", grouped)
    patch.setattr(layer, "needs_no_counts", asked)


@mutant()
def nothing_wrong(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Compute as a GPU does."""
    uncounted(patch)


@mutant(
    in_routes("none", "", rule="prove-activations", tensor=FIRST, bucket_bytes=1 << 20),
)
def ends_off_by_one(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give each expert but the last the first row of the next one, too."""
    uncounted(patch)

    def late(sorted_S: torch.Tensor, num_experts: int) -> torch.Tensor:
        found = ends_of(sorted_S, num_experts)
        return (found + 1).clamp(max=int(found[-1])).to(torch.int32)

    patch.setattr(token_dispatcher, "ends_of", late)
