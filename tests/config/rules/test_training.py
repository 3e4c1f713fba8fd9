"""Optimizer and recompute: each takes the settings that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Optimizer
from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_rotary_scaling_of_learned_positions_has_no_effect() -> None:
    found = problems_of("llama3.1-405b", ["model.positions=learned", "model.rope_theta=10000"])
    assert list(found) == ["no-effect"]
    assert "[model.rope_scaling] changes nothing" in found["no-effect"].message


@pytest.mark.parametrize(
    "setting",
    [
        "recompute.policy=selective",
    ],
)
def test_what_is_not_built_yet_is_refused(small: Path, setting: str) -> None:
    found = problems_of(small, [setting])
    assert list(found) == ["not-built-yet"]
    assert found["not-built-yet"].key == setting.partition("=")[0]
    assert found["not-built-yet"].suggestions != ()


def test_each_optimizer_takes_what_it_uses(small: Path) -> None:
    momentum = ["optimizer.momentum=0.9"]
    moments = ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.eps=1e-6"]
    steps = ["optimizer.newton_schulz_steps=6", "optimizer.decay=blocks"]
    for kind, sets in (
        ("adamw", moments),
        ("sgd", momentum),
        ("muon", [*momentum, *moments, *steps]),
    ):
        optimizer = load_job(small, [f"optimizer.kind={kind}", *sets]).plan.mathematics.optimizer
        assert optimizer.kind == kind
        changed = {text.removeprefix("optimizer.").partition("=")[0] for text in sets}
        default = Optimizer()
        assert all(getattr(optimizer, name) != getattr(default, name) for name in changed)


def test_stored_inputs_of_recomputed_blocks_may_wait_on_the_host(small: Path) -> None:
    job = load_job(small, ["recompute.policy=full", "recompute.offload=host"])
    assert job.plan.layout.recompute.offload == "host"
