"""Keys become JSON, TOML, YAML or a command, with what is recorded for Echelon alone."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import yaml

from echelon.core.errors import ConfigError
from echelon.interop.formats import (
    ExportRefusal,
    as_command,
    as_json,
    as_toml,
    as_yaml,
    factor_for_ratio,
    nest_keys,
    nodes_and_ranks_per_node,
    recorded_entries,
    recorded_lines,
    refusals,
)
from echelon.interop.parsing import command_words, parse_command
from echelon.interop.tools import WRITTEN_TOOLS, WrittenToolName
from tests.interop.imports import Imports, rows_of
from tests.interop.plans import job_of

KEYS: dict[str, object] = {"a.b": 1, "a.c": True, "a.d": "word", "e.f": [1, 2]}
NESTED = {"a": {"b": 1, "c": True, "d": "word"}, "e": {"f": [1, 2]}}
HEADER, RECORDED = ["written by a test"], {"train.steps": 7}

HERE = Path("file")

SETTINGS = {"zero.prefetch": 2, "pipeline.stages": [[0], [1, 2, 3]], "model.name": 'a "b"\\c'}


def test_every_form_holds_the_same_keys() -> None:
    assert nest_keys(KEYS) == NESTED
    assert tomllib.loads(as_toml(KEYS, HEADER, RECORDED)) == NESTED
    assert yaml.safe_load(as_yaml(KEYS, HEADER, RECORDED)) == NESTED
    found = json.loads(as_json(KEYS, HEADER, RECORDED))
    assert found.pop("echelon") == {"notes": HEADER, "train.steps": 7}
    assert found == NESTED


def test_comments_hold_the_header_and_what_is_recorded() -> None:
    for text in (as_toml(KEYS, HEADER, RECORDED), as_yaml(KEYS, HEADER, RECORDED)):
        assert text.startswith("# written by a test\n# echelon: train.steps = 7\n")
    assert "x = inf" in as_toml({"t.x": inf}, [], {})


def test_a_command_has_its_launcher_first() -> None:
    flags: dict[str, object] = {"--lr": 0.5, "--nnodes": 2, "--bf16": True, "--sizes": [2, 4]}
    text = as_command(flags, HEADER, RECORDED, launcher=("--nnodes",), script="train.py")
    assert "torchrun --nnodes 2 train.py" in text
    assert parse_command(HERE, command_words(HERE, text)) == flags


@pytest.mark.parametrize(("ratio", "peak"), [(0.1, 3e-4), (0.3, 7e-4), (1 / 3, 0.1)])
def test_a_factor_gives_its_ratio_again_to_the_last_bit(ratio: float, peak: float) -> None:
    assert factor_for_ratio(ratio, peak) / peak == ratio


def test_nodes_are_filled() -> None:
    plan = job_of(("mesh.dp_replicate=4",)).plan
    assert nodes_and_ranks_per_node(plan) == (1, 4)
    small = replace(plan.cluster, devices_per_node=2)
    assert nodes_and_ranks_per_node(replace(plan, cluster=small)) == (2, 2)


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


def test_the_first_condition_that_holds_refuses_its_setting() -> None:
    found = list(
        refusals(
            (False, "mesh.pp", 2, "does not hold", ()),
            (True, "zero.stage", 3, "first", (2, 1)),
            (1, "zero.stage", 3, "second", (0,)),
            ([], "mesh.cp", 2, "nothing is false, too", ()),
            (True, "mesh.tp", 2, "another", ()),
        )
    )
    assert found == [
        ExportRefusal(
            setting="zero.stage",
            value=3,
            why="first",
            suggestions=({"zero.stage": 2}, {"zero.stage": 1}),
        ),
        ExportRefusal(setting="mesh.tp", value=2, why="another"),
    ]


@pytest.mark.parametrize("name", WRITTEN_TOOLS)
def test_what_a_writer_makes_stands_in_its_file(name: WrittenToolName) -> None:
    plan = job_of(()).plan
    writer = WRITTEN_TOOLS[name].writer
    text = writer.render(writer.keys(plan, {}), ["a line"], {"zero.prefetch": 2})
    recorded = '"zero.prefetch": 2' if name == "deepspeed" else "# echelon: zero.prefetch = 2"
    assert "a line" in text
    assert recorded in text
    assert not list(writer.unsupported(plan))
    assert all(isinstance(line, str) for line in writer.advice(plan))
