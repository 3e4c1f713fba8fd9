"""A config.json in Echelon's own settings: every model says itself, and is read back the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.model.hugging_face import config_entries
from echelon.config.presets import preset_names
from echelon.core.choices.lora import Lora
from echelon.core.errors import CheckpointError, ConfigError
from echelon.core.model_shape import RopeScaling
from echelon.core.parameters import base_shape
from echelon.interop.hugging_face.folder import own_config, shape_of_config
from echelon.training.weights.files import position_problems
from tests.cli.walks.prove_walk import draw
from tests.parallel.layouts import NANO
from tests.walks.plans.random_settings import PRESET, flags_of

YARN = RopeScaling(kind="yarn", factor=4.0, original_positions=32)


def test_models_of_random_plans_are_read_back_as_they_are() -> None:
    num_models = 0
    for number in range(60):
        try:
            job = load_job(PRESET, flags_of(draw(3502, number, "/nowhere")))
        except ConfigError:
            continue
        shape = base_shape(job.plan.model)
        keys = json.loads(json.dumps(own_config(shape)))
        assert shape_of_config(keys, "other") == shape, number
        num_models += 1
    assert num_models > 20


@pytest.mark.parametrize("name", preset_names("models"))
def test_presets_are_read_back_as_they_are(name: str) -> None:
    shape = load_job(name).plan.model
    assert shape_of_config(json.loads(json.dumps(own_config(shape))), "other") == shape


def test_what_was_assumed_of_a_model_is_no_part_of_it() -> None:
    trained = replace(NANO, assumed=("model.norm = rmsnorm",), assume=True)
    assert own_config(trained) == own_config(NANO)


def test_adapters_are_no_part_of_it() -> None:
    tuned = replace(NANO, lora=Lora(rank=2, alpha=16.0, targets=("q",)))
    assert own_config(tuned) == own_config(NANO)
    assert "lora" not in own_config(tuned)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, "hf-config-missing-key"),
        ({"model": 3}, "hf-config-missing-key"),
        ({"model": {"layer": 3}}, "unknown-key"),
        ({"model": {"layers": "many"}}, "wrong-type"),
        ({"model": {"preset": "nano"}}, "hf-config-value"),
        ({"model": {"assumed": "none"}}, "hf-config-value"),
    ],
)
def test_a_table_that_is_no_model_is_refused(config: dict[str, object], rule: str) -> None:
    keys = {"model_type": "echelon", **config}
    _, problems = config_entries(keys, Path("out/config.json"), "test")
    assert [one.rule for one in problems] == [rule]


def test_weights_of_other_positions_are_refused(tmp_path: Path) -> None:
    stretched = replace(NANO, rope_scaling=YARN)
    (tmp_path / "config.json").write_text(json.dumps(own_config(stretched)))
    assert not list(position_problems(tmp_path, stretched))
    (problem,) = position_problems(tmp_path, NANO)
    assert CheckpointError(problem).rules == ("weights-positions",)
    assert "model.rope_scaling" in problem.message
