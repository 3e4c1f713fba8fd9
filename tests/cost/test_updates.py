"""Which rule updates a parameter, and what decays."""

from __future__ import annotations

import pytest

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Optimizer
from echelon.cost.updates import STATE_KINDS, decays, update_of
from tests.core.test_parameters import DEEPSEEK_V3
from tests.parallel.layouts import GPT2, NANO, QWEN

MODELS = (NANO, QWEN, GPT2, DEEPSEEK_V3)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_biases_and_norms_do_not_decay_and_by_choice_neither_do_the_ends(model: ModelShape) -> None:
    for spec in parameters(model):
        small = spec.name.endswith(".bias") or "norm" in spec.name
        end = spec.name in ("embedding.weight", "head.weight", "positions.weight")
        assert decays(Optimizer(), spec) is not small
        assert decays(Optimizer(decay="blocks"), spec) is not (small or end)
        assert decays(Optimizer(decay="all"), spec)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_muon_is_for_the_matrices_of_blocks(model: ModelShape) -> None:
    for spec in parameters(model):
        matrix = spec.name.startswith("layers.") and "norm" not in spec.name
        matrix = matrix and not spec.name.endswith(".bias")
        assert update_of(Optimizer(kind="muon"), spec) == ("muon" if matrix else "adamw")
        assert update_of(Optimizer(kind="sgd"), spec) == "sgd"
        assert update_of(Optimizer(), spec) == "adamw"


def test_adam_keeps_two_moments_the_others_one() -> None:
    assert {update: len(kinds) for update, kinds in STATE_KINDS.items()} == {
        "adamw": 2,
        "sgd": 1,
        "muon": 1,
    }
