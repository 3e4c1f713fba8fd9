"""A loss is a sum and a count; the causal one is that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

from echelon.core.errors import ConfigError
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.parallel.module.loss import CAUSAL, ModuleLoss, loss_of, token_loss_sum

IGNORED = -100
NUM_TOKENS, VOCABULARY = 37, TRAINING_PIECES.row_elements // 10
"""Tokens of several pieces, the last of which is shorter."""


def test_the_causal_loss_predicts_the_token_after_each() -> None:
    logits = torch.randn(2, 4, 7, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, 4], [5, -100, -100, 6]])
    batch = CAUSAL.prepare({"input_ids": labels, "labels": labels})
    expected = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(CAUSAL.sum_of(logits, batch), expected, rtol=1e-14, atol=0.0)
    assert CAUSAL.count_of(batch) == 4
    assert set(CAUSAL.inputs(batch)) == {"input_ids"}
    with pytest.raises(ConfigError, match="no 'labels'"):
        CAUSAL.prepare({"input_ids": labels})


def test_what_may_be_given_for_a_loss() -> None:
    def total(output: Any, batch: Any) -> torch.Tensor:
        return output.sum()

    assert loss_of("causal") is CAUSAL
    assert loss_of(CAUSAL) is CAUSAL
    assert loss_of((total, len)) == ModuleLoss(sum_of=total, count_of=len)
    wrong: Any = "mean"
    with pytest.raises(ConfigError, match="module-loss"):
        loss_of(wrong)


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that want a gradient, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = 4 * torch.randn(NUM_TOKENS, VOCABULARY, generator=generator)
    labels_N = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    labels_N[[0, 11, NUM_TOKENS - 1]] = IGNORED
    return logits_NV.to(dtype).requires_grad_(), labels_N


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 4e-6), (torch.bfloat16, 8e-3)],
)
def test_it_equals_the_cross_entropy_of_float64(dtype: torch.dtype, tolerance: float) -> None:
    logits_NV, labels_N = example(dtype)
    total = token_loss_sum(logits_NV, labels_N, ignored=IGNORED)
    (total * 0.25).backward()
    wide_NV = logits_NV.detach().double().requires_grad_()
    expected = functional.cross_entropy(wide_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    (expected * 0.25).backward()
    torch.testing.assert_close(total.double(), expected, rtol=min(tolerance, 1e-6), atol=0.0)
    assert logits_NV.grad is not None
    assert logits_NV.grad.dtype is dtype
    torch.testing.assert_close(
        logits_NV.grad.double(), wide_NV.grad, rtol=tolerance, atol=1e-7 * (dtype is torch.bfloat16)
    )
    assert not logits_NV.grad[11].any()


def test_a_batch_that_counts_nothing_has_no_loss_and_no_gradient() -> None:
    logits_NV, _ = example(torch.float32)
    total = token_loss_sum(logits_NV, torch.full((NUM_TOKENS,), IGNORED), ignored=IGNORED)
    total.backward()
    assert total.item() == 0.0
    assert logits_NV.grad is not None
    assert not logits_NV.grad.any()


def test_only_the_logits_themselves_are_kept_for_backward() -> None:
    logits_NV, labels_N = example(torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_loss_sum(logits_NV, labels_N, ignored=IGNORED)
    large = [one for one in kept if one.numel() > 2 * NUM_TOKENS]
    assert [one.data_ptr() for one in large] == [logits_NV.data_ptr()]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_and_forward_derivatives_are_those_of_cross_entropy() -> None:
    logits_NV, labels_N = example(torch.float32)
    logits_NV = logits_NV.detach()

    def plain(x_NV: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x_NV, labels_N, ignore_index=IGNORED, reduction="sum")

    def slopes(loss: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        each = torch.func.vmap(torch.func.grad(loss))(torch.stack([logits_NV, -logits_NV]))
        with forward_ad.dual_level():
            y = loss(forward_ad.make_dual(logits_NV, logits_NV.flip(0)))
            return [each, *forward_ad.unpack_dual(y)]

    mine = slopes(partial(token_loss_sum, labels_N=labels_N, ignored=IGNORED))
    for one, other in zip(mine, slopes(plain), strict=True):
        torch.testing.assert_close(one, other)
