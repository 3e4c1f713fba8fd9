"""Keys become JSON, TOML, YAML or a command, with what is recorded for Echelon alone."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import yaml

from echelon.interop.formats import (
    as_command,
    as_json,
    as_toml,
    as_yaml,
    factor_for_ratio,
    nest_keys,
    nodes_and_ranks_per_node,
)
from echelon.interop.parsing import command_words, parse_command
from tests.interop.plans import job_of

KEYS: dict[str, object] = {"a.b": 1, "a.c": True, "a.d": "word", "e.f": [1, 2]}
NESTED = {"a": {"b": 1, "c": True, "d": "word"}, "e": {"f": [1, 2]}}
HEADER, RECORDED = ["written by a test"], {"train.steps": 7}

HERE = Path("file")


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
