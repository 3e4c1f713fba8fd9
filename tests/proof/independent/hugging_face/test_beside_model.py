"""Models of transformers are built in float64, and get each weight at its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as fn

from echelon.core.model_shape import ModelShape
from echelon.proof.independent.hugging_face import beside as peer
from echelon.proof.independent.hugging_face.beside import (
    InFloat64,
    TokensAndLabels,
    build,
    give_weights,
    loss_and_gradients,
    missing,
)
from echelon.proof.independent.hugging_face.configuration import (
    TransformersModel,
    transformers_model,
)
from tests.parallel.layouts import GPT2, NANO
from tests.proof.independent.hugging_face.test_configuration import plan_with
from tests.proof.independent.running import random_weights

BATCH = TokensAndLabels(
    inputs_BT=torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]),
    labels_BT=torch.tensor([[1, 4, 1, 5], [9, 2, -100, 5]]),
)


def built(shape: ModelShape) -> torch.nn.Module:
    found = transformers_model(plan_with(shape))
    assert isinstance(found, TransformersModel)
    return build(found)


def test_calls_that_say_float32_give_float64() -> None:
    x = torch.tensor([1, 2])
    with InFloat64():
        found = (x.float(), x.to(torch.float32), x.type(torch.float32), x.to(dtype=torch.float))
        found += (torch.arange(3, dtype=torch.float), fn.softmax(x, dim=0, dtype=torch.float32))
    assert {one.dtype for one in found} == {torch.float64}
    assert x.float().dtype == torch.float32


def test_the_state_of_random_numbers_is_left_alone() -> None:
    before = torch.get_rng_state()
    model = built(NANO)
    assert torch.equal(torch.get_rng_state(), before)
    assert {one.dtype for one in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("shape", [NANO, GPT2], ids=lambda shape: shape.name)
def test_gradients_are_those_of_a_small_change(shape: ModelShape) -> None:
    """A gradient that stood under another name, or at another place, would not be."""
    model, weights = built(shape), random_weights(shape)
    give_weights(model, shape, weights, {})
    found = loss_and_gradients(model, shape, BATCH)
    assert found.losses_BT[1, 2] == 0.0
    assert found.gradients.keys() == weights.keys()
    units = list(dict.fromkeys(unit for unit, _ in found.parts))
    assert units == ["embedding", *(f"layers.{i}" for i in range(shape.layers)), "head"]
    for name in ("layers.0.attention.k.weight", "layers.1.mlp.up.weight", "norm.weight"):
        place, small = (-1,) * weights[name].dim(), 1e-6
        losses: list[torch.Tensor] = []
        for change in (small, -small):
            changed = weights[name].clone()
            changed[place] += change
            give_weights(model, shape, {**weights, name: changed}, {})
            losses.append(loss_and_gradients(model, shape, BATCH).losses_BT.sum() / 7)
        right = (losses[0] - losses[1]) / (2 * small)
        torch.testing.assert_close(found.gradients[name][place], right, rtol=1e-6, atol=1e-8)


def test_a_weight_that_nothing_is_copied_to_is_told() -> None:
    model = built(replace(NANO, qkv_bias=True, output_bias=True))
    with pytest.raises(AssertionError, match=r"nothing was copied to: .*q_proj.bias"):
        give_weights(model, NANO, random_weights(NANO), {})


@pytest.mark.parametrize(("found", "told"), [("5.1.0", ""), ("4.57.1", "it is 4.57.1, and not 5")])
def test_an_older_version_is_not_used(
    found: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "version", lambda _: found)
    assert missing() == told


def test_a_package_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PACKAGE", "transformers-of-nobody")
    assert missing() == "it is not installed"
