"""What is shown of a run, and that the resolved run file is the run."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from echelon.config.files.show import preset_rows, resolved_toml, settings_json
from echelon.config.job import DataSettings
from echelon.config.load import load_job
from echelon.config.schema import SETTINGS
from echelon.core.choices.updates import Updates
from echelon.core.plan import Mathematics, Optimizer, Precision, Recompute, Zero
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
    rows = load_job(write(tmp_path, SMALL)).sources
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


RECORDS: dict[str, tuple[Any, set[str]]] = {
    "precision": (Precision(), {"fp8_gradients", "int8_block"}),
    "optimizer": (Optimizer(), {"total_steps"}),
    "zero": (Zero(), {"accumulate", "bucket_bytes", "reshard_after_forward", "offload_dir"}),
    "recompute": (Recompute(), {"operators"}),
    "data": (DataSettings(), {"mixture"}),
    "servers": (Updates(), {"kind"}),
}
"""Records of a plan and a job, and their fields whose default a run file gives in another way."""


def test_defaults_stand_in_one_place() -> None:
    """The records have defaults for code that builds them; they are those of run files."""
    for table, (record, others) in RECORDS.items():
        same = {field.name for field in fields(record)} - others
        assert {name: SETTINGS[f"{table}.{name}"].default for name in same} == {
            name: getattr(record, name) for name in same
        }
    assert Mathematics.__dataclass_fields__["seed"].default == SETTINGS["train.seed"].default


REACHED = [
    "cluster.preset=64xcpu",
    "mesh.dp_shard=2",
    "mesh.dp_replicate=2",
    "mesh.pp=2",
    "zero.stage=3",
    "zero.accumulate=slices",
    "zero.reshard_after_forward=never",
    "zero.prefetch=2",
    "zero.unit_blocks=2",
    "zero.keep_whole_below=200",
    "zero.optimizer_offload=nvme",
    "zero.parameter_offload=host",
    "zero.offload_dir=fast",
    "zero.offload_buffers=3",
    "precision.parameters=fp16",
    "precision.gradients=fp16",
    "precision.reduction=fp16",
    "precision.loss_scaling=dynamic",
    "precision.loss_scale=1024",
    "precision.loss_scale_window=50",
    "precision.loss_scale_min=2",
    "precision.loss_scale_hysteresis=2",
    "optimizer.kind=muon",
    "optimizer.momentum=0.9",
    "optimizer.newton_schulz_steps=6",
    "optimizer.decay=blocks",
    "recompute.policy=full",
    "recompute.every=2",
    "recompute.offload=host",
    'recompute.operators=["norm"]',
]


def test_every_choice_of_a_plan_can_be_made_and_is_shown(tmp_path: Path) -> None:
    job = load_job("nano", REACHED)
    layout, mathematics = job.plan.layout, job.plan.mathematics
    made = {text.partition("=")[0] for text in REACHED}
    for table, record in (
        ("zero", layout.zero),
        ("recompute", layout.recompute),
        ("precision", mathematics.precision),
    ):
        changed = {
            field.name
            for field in fields(record)
            if getattr(record, field.name) != getattr(RECORDS[table][0], field.name)
        }
        assert changed == {key.partition(".")[2] for key in made if key.startswith(f"{table}.")}
        untouched = {field.name for field in fields(record)} - changed
        # A bucket is a unit at stage 3, and half precision is updated through an fp32 master; what
        # 8-bit numbers stand for would not be exact in it.
        in_8_bits = {"matmul", "fp8_block", "fp8_scales", "fp8_history", "fp8_gradients"}
        in_8_bits |= {"gather", "int8_block"}
        # Secondary slices are for units that are gathered again, and sums in hops for nodes; a
        # mixture is in the place of a source.
        others = {"bucket_bytes", "master", "secondary", "reduce", "mixture"}
        assert untouched <= others | in_8_bits
    shown = {row.key: row for row in job.sources}
    assert all(shown[key].source.startswith("--set ") for key in made)
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()


@pytest.mark.parametrize(
    "sets",
    [
        ["zero.stage=0"],
        ["mesh.dp_shard=2", "zero.stage=1"],
        ["mesh.dp_shard=2", "zero.stage=3", "precision.parameters=bf16"],
        ["mesh.dp_shard=2", "mesh.pp=2", "zero.stage=3"],
    ],
)
def test_what_was_derived_is_shown_as_chosen_and_gives_the_same_run(
    tmp_path: Path, sets: list[str]
) -> None:
    job = load_job("nano", sets)
    again = load_job(write(tmp_path, resolved_toml(job), "nano.toml"))
    assert again.plan == job.plan
    zero = {row.key: row for row in job.sources if row.key.startswith("zero.")}
    assert zero["zero.accumulate"].value in ('"whole"', '"slices"')
    assert zero["zero.accumulate"].source.startswith("derived: ")
    if job.plan.layout.zero.stage == 3:
        assert zero["zero.reshard_after_forward"].value in ('"always"', '"never"')
        assert zero["zero.reshard_after_forward"].source.startswith("derived: ")
