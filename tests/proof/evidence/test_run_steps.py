"""A step of one device: its clipped gradients, its updates, and the loss of each label."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.evidence.run import CountedTokens, ReferenceStep


def test_a_step_says_what_it_added_and_clipped() -> None:
    step = ReferenceStep(
        step=0,
        loss=1.0,
        grad_norm=2.0,
        clip_scale=0.5,
        gradients={"w": torch.tensor([2.0])},
        before={"w": torch.tensor([1.0])},
        after={"w": torch.tensor([0.75])},
    )
    assert step.clipped("w").item() == 1.0
    assert {name: value.item() for name, value in step.added.items()} == {"w": -0.25}


def test_labels_that_do_not_count_have_no_loss() -> None:
    logits_nV = torch.zeros(3, 4)
    tokens = CountedTokens(
        step=0,
        labels_n=torch.tensor([1, -100, 0]),
        num_classes=4,
        ignored=-100,
        logits_nV=logits_nV,
    )
    assert tokens.token_losses().tolist() == pytest.approx([1.3862943611198906] * 2)
    assert tokens.token_losses(2).tolist() == pytest.approx([0.6931471805599453] * 2)
