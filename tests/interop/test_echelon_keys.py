"""What `echelon export` records beside a tool's own words is read back, below them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.echelon_keys import recorded_entries, recorded_lines
from tests.interop.imports import Imports, rows_of

SETTINGS = {"zero.prefetch": 2, "pipeline.stages": [[0], [1, 2, 3]], "model.name": 'a "b"\\c'}


def test_comments_are_read_as_they_were_written() -> None:
    text = "\n".join(["# a comment", *recorded_lines(SETTINGS), "torchrun x.py --seed 1"])
    found = recorded_entries(Path("file"), text)
    assert {key: entry.value for key, entry in found.items()} == SETTINGS


def test_a_json_has_a_table_whose_notes_are_for_people() -> None:
    text = json.dumps({"echelon": {"notes": ["read me"], **SETTINGS}})
    found = recorded_entries(Path("file"), text)
    assert {key: entry.value for key, entry in found.items()} == SETTINGS


def test_comments_that_are_not_toml_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"import-syntax.*not TOML"):
        recorded_entries(Path("file"), "# echelon: zero.prefetch = = 2")


def test_a_recorded_model_stands_for_what_to_build_on(tmp_path: Path) -> None:
    deepspeed = Imports(tmp_path, "deepspeed")
    recorded = {"model.preset": "gpt2", "batch.sequence_length": 64, "batch.global_sequences": 4}
    found = deepspeed({"zero_optimization": {"stage": 0}, "echelon": recorded}, ranks=1)
    assert found.extends is None
    assert found.job.plan.model.name == "gpt2"
    assert [row.setting for row in rows_of(found, "echelon")] == list(recorded)


def test_what_the_file_says_itself_stands_above(tmp_path: Path) -> None:
    deepspeed = Imports(tmp_path, "deepspeed")
    config = {"zero_optimization": {"stage": 1}, "echelon": {"zero.stage": 2}}
    assert deepspeed(config, ranks=2).job.plan.layout.zero.stage == 1


def test_a_recorded_setting_that_there_is_not_is_named(tmp_path: Path) -> None:
    deepspeed = Imports(tmp_path, "deepspeed")
    config = {"zero_optimization": {"stage": 0}, "echelon": {"zero.prefetsch": 2}}
    (problem,) = deepspeed.problems(config, ranks=1)
    assert (problem.rule, problem.suggestions) == ("unknown-key", ("zero.prefetch",))
