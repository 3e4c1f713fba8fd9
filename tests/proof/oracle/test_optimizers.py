"""The formulas of the oracle are the papers': checked by PyTorch's optimizers and by other ways."""

from __future__ import annotations

import pytest
import torch

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DecayRule, Optimizer, OptimizerKind, Precision
from echelon.proof.oracle.optimizers import (
    LARGEST_GROWN_SCALE,
    NEWTON_SCHULZ,
    OptimizerState,
    OracleLossScale,
    newton_schulz,
    update,
)

EMBEDDING = ParameterSpec(name="embedding.weight", shape=(7, 4), layer=None)
MATRIX = ParameterSpec(name="layers.0.mlp.up.weight", shape=(6, 4), layer=0)
VECTOR = ParameterSpec(name="norm.weight", shape=(5,), layer=None)


def settings(kind: OptimizerKind, decay: DecayRule = "matrices") -> Optimizer:
    """Return an optimizer whose every constant shows."""
    return Optimizer(
        kind=kind, weight_decay=0.3, eps=1e-3, momentum=0.9, decay=decay, newton_schulz_steps=5
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("spec", [EMBEDDING, VECTOR], ids=lambda spec: spec.name)
def test_the_rules_are_those_of_pytorch(kind: OptimizerKind, spec: ParameterSpec) -> None:
    rate, optimizer = 0.05, settings(kind)
    decay = 0.3 if len(spec.shape) > 1 else 0.0
    value, state = random(*spec.shape), OptimizerState()
    theirs = torch.nn.Parameter(value.clone())
    if kind == "adamw":
        torch_optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [theirs], lr=rate, betas=(0.9, 0.95), eps=1e-3, weight_decay=decay, foreach=False
        )
    else:
        torch_optimizer = torch.optim.SGD(
            [theirs], lr=rate, momentum=0.9, weight_decay=decay, foreach=False
        )
    for step in range(4):
        theirs.grad = random(*spec.shape, seed=1 + step)
        value = value + update(spec, value, theirs.grad, state, optimizer, rate).total
        torch_optimizer.step()
    torch.testing.assert_close(value, theirs.detach(), rtol=1e-13, atol=1e-15)
    assert state.num_updates == 4


@pytest.mark.parametrize(
    ("decay", "taken"),
    [("matrices", {EMBEDDING, MATRIX}), ("blocks", {MATRIX}), ("all", {EMBEDDING, MATRIX, VECTOR})],
)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_decay_is_taken_by_rule(
    kind: OptimizerKind, decay: DecayRule, taken: set[ParameterSpec]
) -> None:
    for spec in (EMBEDDING, MATRIX, VECTOR):
        value = random(*spec.shape)
        told = update(spec, value, value * 0, OptimizerState(), settings(kind, decay), 0.1)
        wanted = -0.1 * 0.3 * value if spec in taken else torch.zeros_like(value)
        torch.testing.assert_close(told.decay, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 3)])
def test_newton_schulz_is_its_polynomial_on_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (values.square().sum().sqrt() + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    wanted = left @ torch.diag(values) @ right
    torch.testing.assert_close(newton_schulz(matrix, 5), wanted, rtol=1e-10, atol=1e-12)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.3


def test_newton_schulz_of_nothing_is_nothing_and_narrow_matrices_are_computed_in_float32() -> None:
    assert not bool(newton_schulz(torch.zeros(3, 4), 5).any())
    matrix = random(6, 4)
    narrow = newton_schulz(matrix.bfloat16(), 5)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(
        narrow, newton_schulz(matrix.bfloat16().float(), 5).bfloat16(), rtol=0, atol=0
    )


def test_muon_is_that_of_pytorch_but_for_its_rounding() -> None:
    value, state, optimizer = random(6, 4), OptimizerState(), settings("muon")
    theirs = torch.nn.Parameter(value.clone())
    torch_optimizer = torch.optim.Muon(
        [theirs], lr=0.05, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        theirs.grad = random(6, 4, seed=1 + step)
        # Theirs is a running mean, so its first momentum is (1 - 0.9) of ours: Newton-Schulz
        # takes no notice of the size.
        value = value + update(MATRIX, value, theirs.grad, state, optimizer, 0.05).total
        torch_optimizer.step()
    torch.testing.assert_close(value, theirs.detach(), rtol=0, atol=0.02)


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    for spec, kind in ((MATRIX, "momentum"), (EMBEDDING, "exp_avg"), (VECTOR, "exp_avg")):
        state = OptimizerState()
        update(spec, random(*spec.shape), random(*spec.shape), state, settings("muon"), 0.1)
        assert kind in state.sums


def follow(precision: Precision, overflows: str) -> list[float]:
    """Return the scale of each step; an x is a step that overflows."""
    scale = OracleLossScale.start(precision)
    used: list[float] = []
    for step in overflows:
        used.append(scale.scale)
        scale.follow(precision, overflow=step == "x")
    return [*used, scale.scale]


def test_a_dynamic_scale_halves_after_an_overflow_and_doubles_after_a_window() -> None:
    precision = Precision(loss_scaling="dynamic", loss_scale=8.0, loss_scale_window=2)
    assert follow(precision, "..x..x") == [8, 8, 16, 8, 8, 16, 8]
    assert follow(precision, ".x.") == [8, 8, 4, 4]
    assert follow(precision, "xxxxx") == [8, 4, 2, 1, 1, 1]


def test_hysteresis_is_used_up_until_the_scale_grows_again() -> None:
    precision = Precision(
        loss_scaling="dynamic", loss_scale=8.0, loss_scale_window=2, loss_scale_hysteresis=2
    )
    assert follow(precision, "x.x.x") == [8, 8, 8, 4, 4, 2]
    assert follow(precision, "x..xx") == [8, 8, 8, 16, 16, 8]


def test_other_scales_stay() -> None:
    assert follow(Precision(loss_scaling="fixed", loss_scale=8.0), ".x.") == [8, 8, 8, 8]
    assert follow(Precision(loss_scale=8.0), "..") == [1, 1, 1]
    grown = Precision(
        loss_scaling="dynamic", loss_scale=LARGEST_GROWN_SCALE * 2, loss_scale_window=1
    )
    assert follow(grown, ".") == [LARGEST_GROWN_SCALE * 2] * 2
