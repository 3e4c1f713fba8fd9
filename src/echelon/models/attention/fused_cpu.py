"""PyTorch's fused attention on CPU, with the log-sum-exp that its public function hides.

It takes any floating dtype, and fewer key heads than query heads as they are. Its causal mask
begins at the top left, for rectangles too.
"""

from __future__ import annotations

import torch

from echelon.models.attention.boxes import form_of
from echelon.models.attention.interface import Attended, Gradients, Scores, band_bias

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FusedCpuKernel:
    """Compute a piece without a soft cap on CPU."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of `q`, and lse in at least float32."""
        causal, bias_TS = _mask(q, k, scores)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out, lse_BHT = _forward(q, k, v, 0.0, causal, attn_mask=bias_TS, scale=scores.scale)
        return out.permute(2, 0, 1, 3), lse_BHT

    def backward(self, dout: torch.Tensor, attended: Attended, scores: Scores) -> Gradients:
        """Return the gradients in the dtype of `q`."""
        causal, bias_TS = _mask(attended.q, attended.k, scores)
        dout, q, k, v, out = (
            x.permute(1, 2, 0, 3) for x in (dout, attended.q, attended.k, attended.v, attended.out)
        )
        lse_BHT = attended.lse
        found = _backward(
            dout, q, k, v, out, lse_BHT, 0.0, causal, attn_mask=bias_TS, scale=scores.scale
        )
        return Gradients(*(x.permute(2, 0, 1, 3) for x in found))


def _mask(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> tuple[bool, torch.Tensor | None]:
    """Return whether the kernel's own causal mask is meant, or the bias that hides pairs."""
    form = form_of(scores.band, q.shape[0], k.shape[0])
    if form != "banded":
        return form == "causal", None
    like = q.new_empty(0, dtype=torch.float32) if q.dtype == torch.float16 else q
    return False, band_bias(scores.band, q.shape[0], k.shape[0], like)
