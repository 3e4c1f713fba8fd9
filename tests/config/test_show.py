"""What is shown of a run, and that the resolved run file is the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.config.job import DataSettings
from echelon.config.load import load_job
from echelon.config.schema import SETTINGS, tables
from echelon.config.show import preset_rows, resolved_toml, setting_rows, settings_json
from echelon.core.plan import Mathematics, Optimizer, Recompute, Zero
from tests.config.problems import SMALL, write


@pytest.mark.parametrize("name", ["nano", "llama3.1-405b", "deepseek-v3", "gpt2"])
def test_the_resolved_run_file_is_the_same_run(tmp_path: Path, name: str) -> None:
    sets = ["mesh.pp=2", "mesh.dp_replicate=2", "train.run_name=again", "checkpoint.every=7"]
    job = load_job(name, sets)
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.plan == job.plan
    assert again.content_hash() == job.content_hash()
    assert resolved_toml(again) == resolved_toml(job)


def test_rows_hold_every_setting_in_the_order_of_the_schema(tmp_path: Path) -> None:
    rows = setting_rows(load_job(write(tmp_path, SMALL)))
    keys = [row.key for row in rows]
    assert keys == [key for key in SETTINGS if key in keys]
    absent = set(SETTINGS) - set(keys)
    assert {key for key in absent if not key.startswith("model.")} == {"extends", "cluster.file"}
    assert all(row.value and row.source for row in rows)


def test_json_has_values_as_they_are() -> None:
    shown = settings_json(load_job("nano", ["mesh.tp=2"]))
    assert json.loads(json.dumps(shown)) == shown
    entries = shown["settings"]
    assert isinstance(entries, dict)
    assert entries["mesh.tp"] == {"value": 2, "source": "--set mesh.tp=2"}
    assert entries["pipeline.stages"]["value"] == [[0, 1, 2, 3]]
    assert entries["observe.events"]["value"] is True
    assert shown["schema"] == 1


def test_text_with_quotes_and_controls_survives(tmp_path: Path) -> None:
    job = load_job("nano", [r'train.runs_dir="a\"b\\c\u0007"'])
    assert job.train.runs_dir == 'a"b\\c\x07'
    assert load_job(write(tmp_path, resolved_toml(job))).train.runs_dir == job.train.runs_dir


def test_presets_are_listed_with_what_they_are() -> None:
    rows = preset_rows()
    assert {kind for kind, _, _ in rows} == {"run", "model", "cluster"}
    assert all(len(line) > 10 and not line.startswith("#") for _, _, line in rows)


def test_defaults_stand_in_one_place() -> None:
    """The records have defaults for code that builds them; they are those of run files."""
    assert SETTINGS["optimizer.beta2"].default == Optimizer().beta2
    assert SETTINGS["zero.bucket_bytes"].default == Zero().bucket_bytes
    assert SETTINGS["recompute.policy"].default == Recompute().policy
    assert SETTINGS["data.validation_fraction"].default == DataSettings().validation_fraction
    assert Mathematics.__dataclass_fields__["seed"].default == SETTINGS["train.seed"].default


def test_the_tables_of_a_run_file_are_those_that_are_promised() -> None:
    promised = "model cluster mesh zero pipeline batch precision recompute context experts"
    promised += " optimizer data train checkpoint observe"
    assert {table for table in tables() if "." not in table} == set(promised.split())
