"""Attention by hand is attention where each pair meets once."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.forward.attention import counted_attention
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, run_oracle, token_losses
from tests.proof.layouts import CONTEXTS, context_layout


@pytest.mark.parametrize("kind", CONTEXTS)
def test_pairs_that_meet_once_give_the_losses_of_one_device(kind: str) -> None:
    plan = context_layout(kind)
    (oracle,) = run_oracle(plan, 1)
    batch = global_batch(plan, 0)
    with torch.no_grad():
        right = token_losses(plan, build_decoder(plan, oracle.before), batch, 0)
        counted = counted_attention(lambda seen, batch: seen)
        model = build_decoder(plan, oracle.before, counted)
        torch.testing.assert_close(token_losses(plan, model, batch, 0), right)
