"""A loss is a sum and a count; the causal one is that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from echelon.core.errors import ConfigError
from echelon.parallel.module.loss import CAUSAL, ModuleLoss, loss_of


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
