"""The first part that differs is found, and wrong settings of attention are told apart."""

from __future__ import annotations

import pytest
import torch

from echelon.models.decoder import Norm
from echelon.proof.independent.parts import (
    NotingOperations,
    first_different_part,
    forward_from,
    relative_difference,
)
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, run_oracle, token_losses
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.training.weights.transformers_models import DEEPSEEK


@pytest.mark.parametrize("experts", [False, True])
def test_both_note_the_same_parts(experts: bool) -> None:
    changes = {"dropout": 0.2}
    if experts:
        changes |= {
            name: getattr(DEEPSEEK, name) for name in ("latent", "experts", "kv_heads", "head_dim")
        }
    plan = shrink(layout(accumulation=1, model=changes), precision="fp64")
    (step,), batch = run_oracle(plan, 1), global_batch(plan, 0)
    noting = NotingOperations()
    model = build_decoder(plan, step.before, noting, routing=step.routing)
    token_losses(plan, model, batch, 0)
    runs = forward_from(plan, step, batch).runs
    assert noting.parts.keys() == runs[0].parts.keys()
    assert first_different_part(plan, step, batch) is None


def test_a_part_that_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shrink(layout(accumulation=1, model={"norm": "layernorm"}), precision="fp64")
    (step,), batch = run_oracle(plan, 1), global_batch(plan, 0)
    monkeypatch.setattr(Norm, "normed", lambda self, x: x)
    found = first_different_part(plan, step, batch)
    assert found is not None
    assert (found.part, found.unit) == ("norm", "layers.0")
    assert found.says == "the shared code leaves it out"


def test_a_difference_is_relative_to_the_right_one() -> None:
    one = torch.tensor([2.0, 0.0])
    assert relative_difference(1.5 * one, one) == 0.5
    assert relative_difference(one, 0 * one) == 2.0
