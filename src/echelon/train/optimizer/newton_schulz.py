"""The orthogonal factor of a matrix by the quintic Newton-Schulz iteration (Jordan et al., 2024).

Its singular values come out near 1, not at 1: the coefficients are chosen for the fastest growth of
small ones, and five steps in low precision are enough for an optimizer.

Shape suffixes: M rows, K columns, S the shorter and L the longer side.
"""

from __future__ import annotations

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7


def newton_schulz(update_MK: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the orthogonal factor [M, K]; computed in float32 or float64, zeros stay zeros."""
    wide = update_MK.dtype if update_MK.dtype == torch.float64 else torch.float32
    tall = update_MK.shape[0] > update_MK.shape[1]
    x_SL = update_MK.t() if tall else update_MK
    x_SL = x_SL.to(wide)
    x_SL = x_SL / (torch.linalg.vector_norm(x_SL) + _SMALLEST_NORM)
    for _ in range(steps):
        a_SS = x_SL @ x_SL.t()
        polynomial_SS = torch.addmm(a_SS, a_SS, a_SS, beta=_B, alpha=_C)
        x_SL = torch.addmm(x_SL, polynomial_SS, x_SL, beta=_A)
    return x_SL.t() if tall else x_SL


def step_size(shape: tuple[int, ...]) -> float:
    """Return what makes the update as large as AdamW's usually is: 0.2 sqrt(longer side).

    So both take the same learning rate and weight decay (Liu et al., "Muon is Scalable for LLM
    Training", 2025, section 2.2).
    """
    return 0.2 * max(shape) ** 0.5
