# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fused attention, with the log-sum-exp that its public function hides.

On a CPU it takes any floating dtype, and fewer key heads than query heads as they are; its causal
mask begins at the top left, for rectangles too.

On CUDA it is flash where it can, memory-efficient attention elsewhere. Flash takes float16 and
bfloat16, fewer key heads as they are, and any band in one call (`flash.py`). cuDNN's takes full and
causal squares of the same, on Hopper and Blackwell faster; its causal mask is asked for squares
only, for it begins at the top left. The memory-efficient kernel takes float32, a bias (a band), and
causal rectangles from the top left; its key heads are repeated, and the gradients of the copies
summed. It keeps the log-sum-exp of 32 rows at a time. Its bias has the dtype of the queries, in
which float16 has no number that hides every score: bands of those are computed plainly.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from echelon.layout.attention_tiles import AttentionTile, KernelForm, kernel_form
from echelon.models.attention.flash import FlashArguments, FlashAttention, window_of
from echelon.models.attention.interface import (
    AttentionGradients,
    SavedAttention,
    ScoreRule,
    band_bias,
)
from echelon.models.attention.plain import PlainKernel
from echelon.models.precision import at_least_fp32

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FusedCpuKernel:
    """Compute a piece without a soft cap on CPU."""

    flash: FlashAttention | None = None
    """What takes any band, and many documents, in one call."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of `q`, and lse in at least float32."""
        causal, bias_TS = _mask(q, k, scores)
        q, k, v = _heads_first(q, k, v)
        out, lse_BHT = _forward(q, k, v, 0.0, causal, attn_mask=bias_TS, scale=scores.scale)
        return out.permute(2, 0, 1, 3), lse_BHT

    def backward(
        self, dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule
    ) -> AttentionGradients:
        """Return the gradients in the dtype of `q`."""
        causal, bias_TS = _mask(attended.q, attended.k, scores)
        tensors = _heads_first(dout, attended.q, attended.k, attended.v, attended.out)
        found = _backward(
            *tensors, attended.lse, 0.0, causal, attn_mask=bias_TS, scale=scores.scale
        )
        return AttentionGradients(*(x.permute(2, 0, 1, 3) for x in found))


def _mask(q: torch.Tensor, k: torch.Tensor, scores: ScoreRule) -> tuple[bool, torch.Tensor | None]:
    """Return whether the kernel's own causal mask is meant, or the bias that hides pairs."""
    form = _form(q, k, scores)
    if form != "banded":
        return form == "causal", None
    like = q.new_empty(0, dtype=torch.float32) if q.dtype == torch.float16 else q
    return False, band_bias(scores.band, q.shape[0], k.shape[0], like)


_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward

LSE_ROWS = 32  # rows
BIAS_COLUMNS = 16  # columns
HEAD_DIM_MULTIPLE = 8  # elements


class FusedGpuKernel:
    """Compute a piece without a soft cap on a CUDA GPU, by flash attention where there is one."""

    def __init__(self, flash: FlashAttention | None, *, cudnn: bool = False) -> None:
        """Take `flash` for what it can; with `cudnn` its kernel for squares."""
        self.flash = flash
        self.cudnn = cudnn

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of `q`, and lse in float32."""
        form, length = _form(q, k, scores), q.shape[0]
        if self.flash is None:
            if form == "banded" and q.dtype == torch.float16:
                return PlainKernel().forward(q, k, v, scores)
            bias = _bias(q, k, scores)
            heads = q.shape[2]
            q, k, v = _heads_first(q, _repeated(k, heads), _repeated(v, heads))
            out, lse_BHT, *_ = _efficient(
                q, k, v, bias, True, 0.0, form == "causal", scale=scores.scale
            )
        elif not _square(q, k, form):
            q_BTHd, k_BSHd, v_BSHd = (x.transpose(0, 1) for x in (q, k, v))
            out, lse_BHT = self.flash.forward(q_BTHd, k_BSHd, v_BSHd, _told(q, k, scores))
            return out.transpose(0, 1), lse_BHT
        elif self._by_cudnn(k):
            q, k, v = _heads_first(q, k, v)
            out, lse_BHT1, *_ = _cudnn(
                q, k, v, None, True, 0.0, form == "causal", scale=scores.scale
            )
            lse_BHT = lse_BHT1.view(out.shape[:3])
        else:
            q, k, v = _heads_first(q, k, v)
            out, lse_BHT, *_ = _flash(q, k, v, 0.0, form == "causal", scale=scores.scale)
        return out.permute(2, 0, 1, 3), lse_BHT[:, :, :length]

    def backward(
        self, dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule
    ) -> AttentionGradients:
        """Return the gradients: of repeated key heads in float32, others in the dtype of `q`."""
        q, k = attended.q, attended.k
        form = _form(q, k, scores)
        if self.flash is None:
            if form == "banded" and q.dtype == torch.float16:
                return PlainKernel().backward(dout, attended, scores)
            return _by_efficient(dout, attended, scores)
        if _square(q, k, form):
            return _by_square(dout, attended, scores, cudnn=self._by_cudnn(k))
        dout_BTHd, q_BTHd, k_BSHd, v_BSHd, out_BTHd = (
            x.transpose(0, 1) for x in (dout, q, k, attended.v, attended.out.to(dout.dtype))
        )
        found = self.flash.backward(
            dout_BTHd,
            (q_BTHd, k_BSHd, v_BSHd),
            (out_BTHd, attended.lse.contiguous()),
            _told(q, k, scores),
        )
        return AttentionGradients(*(x.transpose(0, 1) for x in found))

    def _by_cudnn(self, k: torch.Tensor) -> bool:
        """Return whether a square is cuDNN's; it takes no single key."""
        return self.cudnn and k.shape[0] > 1


def _square(q: torch.Tensor, k: torch.Tensor, form: KernelForm) -> bool:
    """Return whether a piece is full, or causal in a square: no kernel needs a window for it."""
    return form == "full" or (form == "causal" and q.shape[0] == k.shape[0])


def _told(q: torch.Tensor, k: torch.Tensor, scores: ScoreRule) -> FlashArguments:
    """Return what flash attention is told of a band."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    left, right = window_of(AttentionTile(slice(0, num_queries), slice(0, num_keys), scores.band))
    return FlashArguments(
        scale=scores.scale, left=left, right=right, most_q=num_queries, most_k=num_keys
    )


def _by_square(
    dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule, *, cudnn: bool
) -> AttentionGradients:
    q, k = attended.q, attended.k
    causal = _form(q, k, scores) == "causal"
    tensors = _heads_first(dout, q, k, attended.v, attended.out.to(dout.dtype))
    sizes = (None, None, q.shape[0], k.shape[0])
    lse_BHT = attended.lse.contiguous()
    # Nothing is dropped, so the state of the random numbers is never read.
    if cudnn:
        seed = offset = torch.empty((), dtype=torch.long, device=q.device)
        found = _cudnn_backward(
            *(*tensors, lse_BHT.unsqueeze(-1), seed, offset, None, *sizes, 0.0, causal),
            scale=scores.scale,
        )
    else:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        found = _flash_backward(
            *(*tensors, lse_BHT, *sizes, 0.0, causal, seed, offset), scale=scores.scale
        )
    return AttentionGradients(*(x.permute(2, 0, 1, 3) for x in found))


def _by_efficient(
    dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule
) -> AttentionGradients:
    q, k, v = attended.q, attended.k, attended.v
    form, bias = _form(q, k, scores), _bias(q, k, scores)
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
    return AttentionGradients(*(x.permute(2, 0, 1, 3) for x in (dq, dk, dv)))


def _bias(q: torch.Tensor, k: torch.Tensor, scores: ScoreRule) -> torch.Tensor | None:
    """Return the bias of a band, [B, H, T, S], its rows aligned as the kernel wants them."""
    if _form(q, k, scores) != "banded":
        return None
    num_keys = k.shape[0]
    aligned = num_keys + -num_keys % BIAS_COLUMNS
    bias_TS = band_bias(scores.band, q.shape[0], aligned, q)[:, :num_keys]
    return bias_TS.expand(q.shape[1], q.shape[2], -1, -1)


def _form(q: torch.Tensor, k: torch.Tensor, scores: ScoreRule) -> KernelForm:
    return kernel_form(scores.band, q.shape[0], k.shape[0])


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
