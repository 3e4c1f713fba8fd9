"""Values of a run preset give way to what the user wrote, by the smallest change, and say so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from tests.config.problems import problems_of, write


def adapted(run: str, *sets: str) -> dict[str, str]:
    """Return the settings of a run that gave way, and their values."""
    job = load_job(run, sets)
    return {row.key: row.value for row in job.sources if row.source.startswith("adapted to ")}


@pytest.mark.parametrize(
    ("run", "sets", "changes"),
    [
        ("nano", ["train.steps=3"], {"optimizer.warmup_steps": "3"}),
        ("nano", ["mesh.dp_replicate=3"], {"batch.global_sequences": "18"}),
        # A microbatch changes nothing of the mathematics, so it gives way before the batch.
        (
            "nano",
            ["mesh.dp_replicate=16", "cluster.preset=16xh100"],
            {"batch.microbatch_sequences": "1"},
        ),
        ("nano", ["data.validation_fraction=0"], {"train.validate_every": '"never"'}),
        ("nano", ["optimizer.warmup_steps=500"], {"train.steps": "500"}),
        ("nano-zero3", ["mesh.tp=2", "cluster.preset=4xh100"], {"mesh.dp_shard": "2"}),
        ("nano-zero3", ["cluster.preset=1xh100"], {"mesh.dp_shard": "1", "zero.stage": "0"}),
        (
            "nano-zero3",
            ["mesh.dp_replicate=3"],
            {"mesh.dp_shard": "2", "batch.global_sequences": "12"},
        ),
        ("nano", ["mesh.cp=3"], {"batch.sequence_length": "126"}),
        ("toy-limited", ["precision.parameters=fp32"], {"precision.loss_scaling": '"none"'}),
    ],
)
def test_a_preset_takes_the_smallest_change(
    run: str, sets: list[str], changes: dict[str, str]
) -> None:
    assert adapted(run, *sets) == changes


def test_the_origin_and_one_line_say_what_gave_way_to_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sets = ["train.steps=3", "mesh.dp_replicate=3"]
    with caplog.at_level(logging.WARNING, logger="echelon"):
        job = load_job("nano", sets)
    warmup = "adapted to train.steps = 3 (preset nano: 20)"
    assert job.source_of("optimizer.warmup_steps") == warmup
    (record,) = caplog.records
    batch = "batch.global_sequences = 18, adapted to mesh.dp_replicate = 3 (preset nano: 16)"
    assert record.getMessage() == f"{batch}; optimizer.warmup_steps = 3, {warmup}"


def test_the_adapted_plan_is_the_plan_in_a_run_folder_too(tmp_path: Path) -> None:
    job = load_job("nano", ["train.steps=3", "mesh.dp_replicate=3"])
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()


def test_what_the_user_wrote_is_refused_and_never_changed(tmp_path: Path) -> None:
    written = ["train.steps=3", "optimizer.warmup_steps=20"]
    assert list(problems_of("nano", written)) == ["learning-rate-fits-steps"]
    run = write(tmp_path, 'extends = "nano"\n[train]\nsteps = 3\n')
    assert load_job(run).plan.mathematics.optimizer.warmup_steps == 3
    write(tmp_path, 'extends = "nano"\n[optimizer]\nwarmup_steps = 20\n', "own.toml")
    over = write(tmp_path, 'extends = "own.toml"\n[train]\nsteps = 3\n', "over.toml")
    assert list(problems_of(over)) == ["learning-rate-fits-steps"]


@pytest.mark.parametrize(
    ("sets", "rules"),
    [
        (["mesh.tp=3"], ["tp-divides-heads", "tp-divides-kv-heads", "tp-divides-ffn"]),
        (["batch.sequence_length=2000"], ["sequence-fits-positions"]),
        (["mesh.dp_replicate=16"], ["fits-cluster"]),
        (["mesh.sequence_parallel=true"], ["no-effect"]),
    ],
)
def test_models_clusters_and_defaults_give_no_way(sets: list[str], rules: list[str]) -> None:
    assert sorted(problems_of("nano", sets)) == sorted(rules)


def test_problems_are_those_that_are_left() -> None:
    found = problems_of("nano", ["train.steps=3", "mesh.tp=3"])
    assert "learning-rate-fits-steps" not in found
    assert "tp-divides-heads" in found


SETS = (
    *("train.steps=1", "mesh.dp_replicate=3", "mesh.dp_replicate=8", "mesh.pp=2", "mesh.cp=2"),
    *("batch.global_sequences=7", "batch.microbatch_sequences=3", "checkpoint.every=never"),
    *("optimizer.schedule=constant", "optimizer.kind=sgd", "cluster.preset=1xh100"),
)


@pytest.mark.parametrize("preset", preset_names("runs"))
def test_no_single_setting_is_refused_for_a_value_of_the_preset(preset: str) -> None:
    logging.getLogger("echelon").setLevel(logging.ERROR)
    try:
        for text in SETS:
            try:
                job = load_job(preset, [text])
            except ConfigError as error:
                # What is refused is the user's own word, beside the model or a default.
                told = [one.set_by for one in error.problems]
                assert all("--set" in one and "preset" not in one for one in told), (text, told)
            else:
                key, _, value = text.partition("=")
                assert load_value(job, key) == value, text
    finally:
        logging.getLogger("echelon").setLevel(logging.NOTSET)


def load_value(job: object, key: str) -> str:
    """Return the value of a setting as it was typed."""
    rows = job.sources  # pyright: ignore[reportAttributeAccessIssue]
    return next(row.value for row in rows if row.key == key).strip('"')
