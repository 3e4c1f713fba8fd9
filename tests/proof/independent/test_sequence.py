"""Norms are PyTorch's; dropout is a function of seed, step, site and place; parts are numbered."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.proof.independent.sequence import layer_norm, root_mean_square_norm
from tests.parallel.layouts import NANO
from tests.proof.independent.running import random_weights, sequence_run

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SCALE, BIAS = torch.rand(16, dtype=torch.float64), torch.rand(16, dtype=torch.float64)


def test_norms_are_pytorchs() -> None:
    right = torch.nn.functional.rms_norm(X, (16,), SCALE, 1e-3)
    torch.testing.assert_close(root_mean_square_norm(X, SCALE, 1e-3), right)
    right = torch.nn.functional.layer_norm(X, (16,), SCALE, BIAS, 1e-3)
    torch.testing.assert_close(layer_norm(X, SCALE, BIAS, 1e-3), right)


def test_dropout_keeps_the_mean_and_depends_on_place_step_and_site() -> None:
    model = replace(NANO, dropout=0.25)
    weights = random_weights(model)
    ones = torch.ones(400, 16, dtype=torch.float64)
    run = sequence_run(model, weights, [0] * 400)
    dropped = run.dropped_out(ones, "layers.0.mlp")
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float(dropped.mean()) - 1.0) < 0.03
    assert dropped.equal(run.dropped_out(ones, "layers.0.mlp"))
    for changed in ({"step": 1}, {"seed": 1}, {"sample": 1}):
        other = sequence_run(model, weights, [0] * 400, **changed)
        assert not dropped.equal(other.dropped_out(ones, "layers.0.mlp"))
    assert not dropped.equal(run.dropped_out(ones, "embedding"))
    assert sequence_run(NANO, weights, [0]).dropped_out(ones, "embedding") is ones


def test_parts_of_a_unit_are_numbered() -> None:
    run = sequence_run(NANO, random_weights(NANO), [0])
    run.note("norm", X)
    run.note("norm", X)
    run.unit = "layers.1"
    run.note("norm", X)
    assert list(run.parts) == [
        ("layers.0", "norm", 0),
        ("layers.0", "norm", 1),
        ("layers.1", "norm", 0),
    ]
    assert run.linear(X, "attention.q").equal(X @ run.weights["layers.1.attention.q.weight"].T)
