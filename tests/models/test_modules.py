"""What modules hold: weights without values, on the device that is asked for."""

from __future__ import annotations

import pytest
import torch

from echelon.models.modules import EmptyLinear, TensorShare, Weight


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_has_the_shape_and_the_bias_that_are_asked_for(bias: bool) -> None:
    weight = Weight(3, 5, bias=bias)
    assert weight.weight.shape == (3, 5)
    assert [name for name, _ in weight.named_parameters()] == ["weight", "bias"][: 1 + bias]
    if bias:
        assert weight.bias is not None
        assert weight.bias.shape == (3,)


def test_a_linear_layer_draws_no_values() -> None:
    drawn = torch.random.get_rng_state()
    linear = EmptyLinear(4, 6)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    with torch.device("meta"):
        away = EmptyLinear(4, 6, bias=False)
    assert (linear.weight.shape, away.weight.is_meta, away.bias) == ((6, 4), True, None)


def test_without_a_word_a_rank_holds_everything() -> None:
    assert TensorShare() == TensorShare(tp=1, expert_tp=1, experts=None)
