"""Bugs in what the calls of a GPU's flash attention are told; the reference of its kernel computes.

Each engine here attends by those calls, on ranks of a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.attention import fused, local, packed
from echelon.models.attention.flash import starts_of, window_of
from echelon.models.attention.fused import FusedGpuKernel
from tests.models.attention.flash_reference import ReferenceFlash
from tests.proof.mutants.context_layouts import ATTENTION, DOCUMENTS, split
from tests.proof.mutants.planting import Told, mutant

WINDOW: dict[str, Any] = {"model": {"window": 5}}


def by_flash(patch: pytest.MonkeyPatch) -> None:
    """Let attention be calls of flash attention."""
    flash = ReferenceFlash(strict=False)
    patch.setattr(local, "kernel_for", lambda *_: FusedGpuKernel(flash))
    patch.setattr(fused, "_square", lambda *_: False)


@mutant()
def nothing_wrong(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Attend by the calls as they are."""
    by_flash(patch)


@mutant(
    Told("prove-activations", ATTENTION, "documents off by one", plan={**DOCUMENTS}),
    Told("prove-activations", ATTENTION, "none", plan=split("gathered", **DOCUMENTS)),
)
def starts_off_by_one(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Start each document but the first one token late."""
    by_flash(patch)

    def late(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
        found = starts_of(lengths, device).clone()
        found[1:-1] += 1
        return found

    patch.setattr(packed, "starts_of", late)


@mutant(
    Told("prove-activations", ATTENTION, "mask off by one", plan={**WINDOW}),
    Told("prove-activations", ATTENTION, "mask off by one", "cp", plan=split("ring", **WINDOW)),
)
def window_off_by_one(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let a query meet one key more than its window has."""
    by_flash(patch)

    def wide(box: AttentionTile) -> tuple[int, int]:
        left, right = window_of(box)
        return (left if left < 0 else left + 1), right

    patch.setattr(fused, "window_of", wide)
