"""A value must fit its setting: of its type, within its range."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.settings.value_types import COUNT, NUMBERS_OR_ZERO
from tests.config.problems import SMALL, problems_of, write


@pytest.mark.parametrize(
    ("value", "rule", "works"),
    [
        ('"2"', "wrong-type", ("2",)),
        ("1.5", "wrong-type", ("1", "2")),
        ("true", "wrong-type", ("1",)),
        ("[2]", "wrong-type", ("1",)),
        ("0", "degree-at-least-one", ("1",)),
        ("-2", "degree-at-least-one", ("1",)),
        ("1_000_000_000_000", "out-of-range", ("1048576",)),
    ],
)
@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
def test_a_degree_is_a_whole_number_from_one(
    tmp_path: Path, axis: str, value: str, rule: str, works: tuple[str, ...]
) -> None:
    run = write(tmp_path, f"{SMALL}\n[mesh]\n{axis} = {value}")
    found = problems_of(run)
    assert list(found) == [rule]
    assert found[rule].key == f"mesh.{axis}"
    assert found[rule].set_by == f"{run}:16"
    assert found[rule].suggestions == works


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("optimizer.learning_rate=0", "out-of-range"),
        ("optimizer.learning_rate=-1e-3", "out-of-range"),
        ("optimizer.learning_rate=inf", "out-of-range"),
        ("optimizer.learning_rate=nan", "out-of-range"),
        ("optimizer.learning_rate=fast", "wrong-type"),
        ("optimizer.beta1=1.0", "out-of-range"),
        ("optimizer.clip_norm=0", "out-of-range"),
        ("optimizer.kind=adam", "unknown-choice"),
        ("model.dropout=1", "out-of-range"),
        ("model.layers=0", "out-of-range"),
        ("model.tied=1", "wrong-type"),
        ("zero.stage=4", "out-of-range"),
        ("recompute.policy=ful", "unknown-choice"),
        ("pipeline.stages=evn", "wrong-type"),
        ("pipeline.stages=[0, 1]", "wrong-type"),
        ("train.run_name=a/b", "out-of-range"),
        ("train.validate_every=0", "out-of-range"),
        ("checkpoint.every=nevr", "wrong-type"),
        ("data.source=''", "out-of-range"),
    ],
)
def test_a_value_must_fit_its_setting(setting: str, rule: str) -> None:
    found = problems_of("nano", [setting])
    assert rule in found
    assert found[rule].key == setting.partition("=")[0]
    assert found[rule].set_by == f"--set {setting}"
    assert "conflicting-settings" not in found


def test_elements_and_parameters_are_typed_as_people_write_them() -> None:
    assert NUMBERS_OR_ZERO.check("1M") is None
    assert NUMBERS_OR_ZERO.read("1M") == 10**6
    half = NUMBERS_OR_ZERO.check("1.5")
    assert half is not None
    assert half.rule.id == "unreadable-quantity"
    assert "in numbers" not in half.message


def test_thousands_of_tokens_could_be_either_and_both_are_offered() -> None:
    found = COUNT.check("8k")
    assert found is not None
    assert found.suggestions == ("8192", "8000")
