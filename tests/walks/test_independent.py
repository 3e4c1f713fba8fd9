"""A walk compares plans one by one, and counts those that differ."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from echelon.config.presets import preset_names
from echelon.models.operations import Operations
from tests.walks.independent import main, matrix_plans, preset_plans, space_plans

SEED = random.SystemRandom().randrange(10**6)


def test_plans_are_small_and_in_float64() -> None:
    names = [plan.name for plan in islice(preset_plans(), 2)]
    assert names == list(preset_names("models"))[:2]
    plans = list(matrix_plans(2, 3))
    assert {plan.mathematics.precision.parameters for plan in plans} == {"fp64"}
    drawn = list(space_plans(4, 5))
    assert 0 < len(drawn) <= 4
    assert all(plan.name.partition(": ")[2] for plan in drawn)


@pytest.mark.slow
def test_random_plans_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count=5", f"--seed={SEED}", "--steps=1"]) == 0, capsys.readouterr().out
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"seed {SEED}"
    assert last.startswith("5 of 5 hold, off by ")


@pytest.mark.slow
@pytest.mark.parametrize("space", [(), ("--space",)])
def test_sixty_random_plans_hold(
    space: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--count=60", f"--seed={SEED}", *space]) == 0, capsys.readouterr().out


def test_a_plan_that_differs_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Operations, "add", lambda self, x_ND, y_ND: x_ND - y_ND)
    assert main(["--count=1", "--seed=1", "--steps=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ": DIFFERS; " in lines[1]
    assert lines[2].startswith("first wrong: layers.0 (residual sum)")
    assert lines[3].startswith("0 of 1 hold")
