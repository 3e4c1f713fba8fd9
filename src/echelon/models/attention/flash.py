# SPDX-License-Identifier: Apache-2.0
"""Flash attention of any band, and of many documents in one call: what the kernel is told.

A query of a row i of its segment meets the keys j of its segment where
``i + s - left <= j <= i + s + right``, s being how many more keys than queries the segment has: the
last query lies beside the last key (Dao, "FlashAttention-2", 2023; `window_size` in the interface
of flash-attn). A segment is the rows from one of `starts_q` up to the next, with the keys from one
of `starts_k` up to the next; without them each sequence of a batch is one.

PyTorch has these calls in every build for CUDA (`aten/src/ATen/native/transformers`). Where the
package of FlashAttention-3 is installed on a Hopper GPU, PyTorch runs the same calls by it
(`flash_on`).

Shape suffixes: B sequences, T queries, S keys, R rows of all segments, H query and K key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from echelon.core.choices.kernels import AttentionKernel
from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import FLASH_3_INSTALLED
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.batch import start_copy

FLASH_3_PACKAGE = "flash_attn_interface"

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashArguments:
    """Hold what a call is told beside its tensors; -1: no bound on that side."""

    scale: float
    """What products of queries and keys are multiplied by."""
    left: int
    """Keys before its own that a query meets."""
    right: int
    """Keys behind its own that a query meets."""
    most_q: int
    """Rows of the longest segment."""
    most_k: int
    """Keys of the longest segment."""
    starts_q: torch.Tensor | None = None
    """Where the rows of each segment start, and where the last ones end, int32 on the device."""
    starts_k: torch.Tensor | None = None
    """The same of the keys."""

    @property
    def causal(self) -> bool:
        """Return whether it is the plain causal mask, for which kernels have a way of their own."""
        return self.left < 0 and self.right == 0


class FlashAttention:
    """Call the kernel: dense tensors are [B, T, H, hd] with lse [B, H, T]; segments are [R, H, hd]
    with lse [H, R]."""

    def __init__(self, *, is_third: bool = False) -> None:
        """Say with `is_third` that PyTorch runs its calls by FlashAttention-3."""
        self.is_third = is_third

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, told: FlashArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of `q`, and lse in float32."""
        out, lse, *_ = _forward(
            *(q, k, v, told.starts_q, told.starts_k, told.most_q, told.most_k),
            *(0.0, told.causal, False),
            scale=told.scale,
            window_size_left=told.left,
            window_size_right=told.right,
        )
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor],
        told: FlashArguments,
    ) -> Gradients:
        """Return the gradients of q, k and v in their dtype."""
        # Nothing is dropped, so the state of the random numbers is never read.
        seed = torch.empty(2, dtype=torch.uint64, device=dout.device)
        unused = torch.empty((), dtype=torch.uint64, device=dout.device)
        dq, dk, dv = _backward(
            *(dout, *inputs, *outputs, told.starts_q, told.starts_k, told.most_q, told.most_k),
            *(0.0, told.causal, seed, unused),
            scale=told.scale,
            window_size_left=told.left,
            window_size_right=told.right,
        )
        return dq, dk, dv


def window_of(box: AttentionTile) -> tuple[int, int]:
    """Return how many keys before and behind its own a query of a trimmed box meets; -1: all."""
    more, low, high = box.num_keys - box.num_queries, box.band.low, box.band.high
    left = -1 if high is None else high + more
    right = -1 if low is None else -low - more
    assert low is None or right >= 0, "a trimmed box has no key that no query meets"
    assert high is None or left >= 0, "a trimmed box has no query that meets no key"
    return left, right


@lru_cache(maxsize=64)
def starts_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where segments of these lengths start, and where the last one ends, int32."""
    found = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths), 0, dtype=torch.int32, out=found[1:])
    return start_copy(found, device)


@lru_cache(maxsize=8)
def flash_on(device: torch.device, kernel: AttentionKernel) -> FlashAttention:
    """Return flash attention on a device, chosen once: by FlashAttention-3 where that is there.

    Who asks for "flash" gets PyTorch's own. Raises EnvironmentProblem where "flash-3" is missing.
    """
    there = has_flash_3(device)
    if kernel == "flash-3" and not there and device.type == "cuda":
        raise EnvironmentProblem(
            FLASH_3_INSTALLED.problem(
                f"{FLASH_3_PACKAGE} is not installed for PyTorch {torch.__version__} on "
                f"{torch.cuda.get_device_name(device)}",
                key="context.attention",
            )
        )
    is_third = there and kernel in ("auto", "flash-3")
    if is_third:
        attention: Any = torch.nn.attention
        # PyTorch runs its calls of flash attention by it from now on, in this process.
        attention.activate_flash_attention_impl("FA3")
    return FlashAttention(is_third=is_third)


def has_flash_3(device: torch.device) -> bool:
    """Return whether FlashAttention-3 is installed, and this is a GPU that it is for."""
    if device.type != "cuda" or find_spec(FLASH_3_PACKAGE) is None:
        return False
    return "FA3" in _implementations() and torch.cuda.get_device_capability(device)[0] == 9


def _implementations() -> list[str]:
    """Return what PyTorch knows beside its own; versions before 2.12 do not know the third."""
    known: Any = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    return [] if known is None else known()
