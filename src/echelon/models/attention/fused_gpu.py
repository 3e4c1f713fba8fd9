"""PyTorch's fused attention on CUDA: flash where it can, memory-efficient attention elsewhere.

Flash takes float16 and bfloat16, and fewer key heads as they are; its causal mask begins at the
bottom right, so it is asked for squares only. The memory-efficient kernel takes float32, a bias
(a band), and causal rectangles from the top left; its key heads are repeated, and the gradients
of the copies summed. It keeps the log-sum-exp of 32 rows at a time. Its bias has the dtype of the
queries, in which float16 has no number that hides every score: bands of those are computed plainly.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from echelon.models.attention.boxes import form_of
from echelon.models.attention.interface import Attended, Gradients, Scores, band_bias
from echelon.models.attention.plain import PlainKernel
from echelon.models.precision import NARROW, at_least_fp32

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward

LSE_ROWS = 32
BIAS_COLUMNS = 16
HEAD_DIM_MULTIPLE = 8
FLASH_MAX_HEAD_DIM = 256


class FusedGpuKernel:
    """Compute a piece without a soft cap on a CUDA GPU that has the `flash` kernel, or has not."""

    def __init__(self, *, flash: bool) -> None:
        self.flash = flash

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of `q`, and lse in float32."""
        form, length = form_of(scores.band, q.shape[0], k.shape[0]), q.shape[0]
        if form == "banded" and q.dtype == torch.float16:
            return PlainKernel().forward(q, k, v, scores)
        if self._takes(q, k, scores):
            q, k, v = _heads_first(q, k, v)
            out, lse_BHT, *_ = _flash(q, k, v, 0.0, form == "causal", scale=scores.scale)
        else:
            bias = _bias(q, k, scores)
            heads = q.shape[2]
            q, k, v = _heads_first(q, _repeated(k, heads), _repeated(v, heads))
            out, lse_BHT, *_ = _efficient(
                q, k, v, bias, True, 0.0, form == "causal", scale=scores.scale
            )
        return out.permute(2, 0, 1, 3), lse_BHT[:, :, :length]

    def backward(self, dout: torch.Tensor, attended: Attended, scores: Scores) -> Gradients:
        """Return the gradients: of repeated key heads in float32, others in the dtype of `q`."""
        q, k = attended.q, attended.k
        if form_of(scores.band, q.shape[0], k.shape[0]) == "banded" and q.dtype == torch.float16:
            return PlainKernel().backward(dout, attended, scores)
        if self._takes(q, k, scores):
            return _by_flash(dout, attended, scores)
        return _by_efficient(dout, attended, scores)

    def _takes(self, q: torch.Tensor, k: torch.Tensor, scores: Scores) -> bool:
        """Return whether flash attention is right for a piece."""
        form = form_of(scores.band, q.shape[0], k.shape[0])
        square = q.shape[0] == k.shape[0]
        narrow = q.dtype in NARROW and q.shape[-1] <= FLASH_MAX_HEAD_DIM
        return self.flash and narrow and (form == "full" or (form == "causal" and square))


def _by_flash(dout: torch.Tensor, attended: Attended, scores: Scores) -> Gradients:
    num_queries, num_keys = attended.q.shape[0], attended.k.shape[0]
    causal = form_of(scores.band, num_queries, num_keys) == "causal"
    dout, q, k, v, out = _heads_first(
        dout, attended.q, attended.k, attended.v, attended.out.to(dout.dtype)
    )
    # Nothing is dropped, so the state of the random numbers is never read.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    lse_BHT = attended.lse.contiguous()
    sizes = (None, None, num_queries, num_keys)
    found = _flash_backward(
        *(dout, q, k, v, out, lse_BHT, *sizes, 0.0, causal, seed, offset), scale=scores.scale
    )
    return Gradients(*(x.permute(2, 0, 1, 3) for x in found))


def _by_efficient(dout: torch.Tensor, attended: Attended, scores: Scores) -> Gradients:
    q, k, v = attended.q, attended.k, attended.v
    form, bias = form_of(scores.band, q.shape[0], k.shape[0]), _bias(q, k, scores)
    heads, groups = q.shape[2], k.shape[2]
    dout, q, k, v, out = _heads_first(
        dout, q, _repeated(k, heads), _repeated(v, heads), attended.out.to(q.dtype)
    )
    seed = offset = torch.zeros((), dtype=torch.long, device=q.device)
    padding = -q.shape[2] % LSE_ROWS
    # Rows beyond the last have no weight: exp(score - inf) = 0.
    lse_BHT = fn.pad(attended.lse, (0, padding), value=float("inf")).contiguous()
    wanted = [True, True, True, False]
    dq, dk, dv, _ = _efficient_backward(
        *(dout, q, k, v, bias, out, lse_BHT, seed, offset, 0.0, wanted, form == "causal"),
        scale=scores.scale,
    )
    dk, dv = (_summed(x, groups) for x in (dk, dv))
    return Gradients(*(x.permute(2, 0, 1, 3) for x in (dq, dk, dv)))


def _bias(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor | None:
    """Return the bias of a band, [B, H, T, S], its rows aligned as the kernel wants them."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    if form_of(scores.band, num_queries, num_keys) != "banded":
        return None
    aligned = num_keys + -num_keys % BIAS_COLUMNS
    bias_TS = band_bias(scores.band, num_queries, aligned, q)[:, :num_keys]
    return bias_TS.expand(q.shape[1], q.shape[2], -1, -1)


def _heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.permute(1, 2, 0, 3) for x in tensors)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [S, B, K, hd] with each head as often as query heads meet it."""
    repeats = heads // x.shape[2]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=2)


def _summed(dx_BHSd: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the gradient of heads that were repeated, [B, K, S, hd]."""
    if dx_BHSd.shape[1] == groups:
        return dx_BHSd
    return dx_BHSd.unflatten(1, (groups, -1)).sum(2, dtype=at_least_fp32(dx_BHSd.dtype))
