"""Rates, groups, clip, loss scale and Muon, on numbers that follow from their definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.errors import ConfigError
from echelon.core.plan import Optimizer, Precision
from echelon.proof.independent.optimizers import (
    KINDS,
    ScaleOfLoss,
    UpdateRules,
    clip_factor,
    decays,
    norm_of,
    rate_of,
    require_formula,
)
from echelon.proof.independent.weights import WeightFacts

SETTINGS = Optimizer(
    learning_rate=1.0, warmup_steps=2, total_steps=10, final_ratio=0.2, decay_steps=4
)
MATRIX = WeightFacts(shape=(6, 4), in_block=True)
TABLE, VECTOR = WeightFacts(shape=(7, 4)), WeightFacts(shape=(4,), in_block=True)


def test_learning_rates() -> None:
    linear, cosine, wsd = (replace(SETTINGS, schedule=s) for s in ("linear", "cosine", "wsd"))
    assert [rate_of(linear, step) for step in (0, 1, 2, 6, 10, 11)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    )
    assert [rate_of(cosine, step) for step in (2, 6, 10)] == pytest.approx([1.0, 0.6, 0.2])
    assert [rate_of(wsd, step) for step in (2, 6, 8, 10)] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    assert rate_of(replace(SETTINGS, schedule="constant"), 9) == 1.0


def test_groups_of_decay() -> None:
    found = {
        rule: [decays(replace(SETTINGS, decay=rule), fact) for fact in (MATRIX, TABLE, VECTOR)]
        for rule in ("all", "matrices", "blocks")
    }
    assert found == {
        "all": [True, True, True],
        "matrices": [True, True, False],
        "blocks": [True, False, False],
    }


def test_a_clip_acts_above_its_norm() -> None:
    gradients = {"a": torch.tensor([3.0]).double(), "b": torch.tensor([[4.0]]).double()}
    assert norm_of(gradients) == 5.0
    assert clip_factor(replace(SETTINGS, clip_norm=1.0), 5.0) == 0.2
    assert clip_factor(replace(SETTINGS, clip_norm=9.0), 5.0) == 1.0
    assert clip_factor(replace(SETTINGS, clip_norm=None), 5.0) == 1.0
    assert norm_of({"a": torch.tensor([1e200], dtype=torch.float64)}) == float("inf")


def test_a_dynamic_scale_falls_and_grows() -> None:
    settings = Precision(
        loss_scaling="dynamic", loss_scale=8.0, loss_scale_window=2, loss_scale_hysteresis=2
    )
    scale = ScaleOfLoss.first(settings)
    seen: list[float] = []
    for overflow in (True, True, True, False, False, True, False):
        scale.after(overflow=overflow)
        seen.append(scale.scale)
    assert seen == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    assert ScaleOfLoss.first(Precision()).scale == 1.0


def test_an_optimizer_without_a_formula_is_refused() -> None:
    require_formula(SETTINGS)
    with pytest.raises(ConfigError, match="'lion' has no independent formula") as raised:
        require_formula(replace(SETTINGS, kind="lion"))
    assert raised.value.problems[0].rule == "prove-independent-optimizer"


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return five steps of the quintic on a wide or square matrix, as the authors write it."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_moves_matrices_along_the_quintic_and_adamw_the_rest() -> None:
    settings = replace(SETTINGS, kind="muon", momentum=0.9, weight_decay=0.1, decay="blocks")
    facts = {"layers.0.up": MATRIX, "table": TABLE}
    generator = torch.Generator().manual_seed(0)
    values, first, second = (
        {
            n: torch.randn(f.shape, generator=generator, dtype=torch.float64)
            for n, f in facts.items()
        }
        for _ in range(3)
    )
    rules = UpdateRules(settings, facts, values)
    rules.step(first, 0.01)
    rules.step(second, 0.01)
    w, buffer = values["layers.0.up"], torch.zeros(6, 4, dtype=torch.float64)
    for gradient in (first["layers.0.up"], second["layers.0.up"]):
        buffer = 0.9 * buffer + gradient
        direction = newton_schulz((gradient + 0.9 * buffer).T).T
        w = w - 0.01 * 0.1 * w - 0.01 * 0.2 * 6**0.5 * direction
    torch.testing.assert_close(rules.values["layers.0.up"].detach(), w, rtol=1e-11, atol=1e-12)
    moved = rules.values["table"].detach() - values["table"]
    assert float(moved.abs().max()) < 0.021
    assert "muon" in KINDS
