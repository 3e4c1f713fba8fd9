"""A plan becomes the fewest settings that give it again, whatever it was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.cluster.file import cluster_toml
from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.settings.value_types import toml_text
from echelon.interop.export import export_plan
from echelon.interop.plan_settings import needed_settings, resolve_settings, shortest_model
from tests.interop.plans import job_of
from tests.interop.test_export import written

SEARCHED = ("mesh.pp=2", "pipeline.schedule=auto", "pipeline.virtual_stages=1")


def test_a_preset_is_its_name() -> None:
    job = load_job("llama3.1-405b", ["cluster.preset=1024xh100", "mesh.tp=8", "mesh.pp=16"])
    found = needed_settings(job.plan).settings
    assert found == {
        "model.preset": "llama3.1-405b",
        "cluster.preset": "1024xh100",
        "mesh.pp": 16,
        "mesh.tp": 8,
        "batch.global_sequences": 2048,
        "batch.sequence_length": 8192,
        "precision.parameters": "bf16",
        "train.run_name": "llama3.1-405b",
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cluster", ["8xh100", "8xv100-32gb", "laptop"])
def test_dtypes_of_a_plan_are_written(dtype: str, cluster: str) -> None:
    sets = [f"cluster.preset={cluster}", f"precision.parameters={dtype}"]
    sets += ["precision.loss_scaling=dynamic"] * (dtype == "fp16")
    plan = load_job("nano", sets).plan
    again = resolve_settings(needed_settings(plan).settings, Path(), plan.name).plan
    assert again.mathematics.precision == plan.mathematics.precision


@pytest.mark.parametrize(
    ("sets", "model"),
    [
        (["model.hidden=256"], {"model.preset": "nano", "model.hidden": 256, "model.head_dim": 64}),
        (["model.name=mine"], {"model.preset": "nano", "model.name": "mine"}),
        (["model.window=64"], {"model.preset": "nano", "model.window": 64}),
    ],
)
def test_a_changed_preset_is_its_name_and_what_was_changed(
    sets: list[str], model: dict[str, object]
) -> None:
    assert shortest_model(load_job("nano", sets).plan.model) == model


def test_a_model_without_a_part_of_its_preset_is_written_out() -> None:
    whole = load_job("deepseek-v3").plan.model
    found = shortest_model(replace(whole, experts=None))
    assert "model.preset" not in found
    assert (found["model.name"], found["model.ffn"]) == ("deepseek-v3", 18432)


def test_every_setting_of_a_plan_is_there() -> None:
    job = job_of(("mesh.dp_shard=4", "zero.stage=3"))
    found = plan_settings(job.plan)
    # Without rounds of local SGD, or adapters, their settings are without effect, and left out.
    of_run = (
        "data.",
        "checkpoint.",
        "observe.",
        "train.",
        "cluster.",
        "pipeline.",
        "local_sgd.",
        "lora.",
    )
    missing = [row.key for row in job.sources if row.key not in found]
    assert [key for key in missing if not key.startswith(of_run)] == ["model.preset"]
    assert found["zero.accumulate"] == "slices"


def test_sources_and_trackers_of_a_run_come_out_as_they_were_said(tmp_path: Path) -> None:
    mixture = [
        {"path": "stdlib", "weight": 3.0, "until_step": 5},
        {"path": "stdlib", "weight": 1.0},
    ]
    said = [f"data.mixture={toml_text(mixture)}", 'observe.trackers=["tensorboard"]']
    job = load_job("nano", said)
    found = needed_settings(job.plan, job).settings
    assert found["data.mixture"] == mixture
    assert found["observe.trackers"] == ["tensorboard"]
    again = resolve_settings(found, tmp_path)
    assert (again.data, again.observe) == (job.data, job.observe)
    plain = load_job("nano")
    found = needed_settings(plain.plan, plain).settings
    assert not {"data.mixture", "observe.trackers"} & found.keys()


def test_a_searched_schedule_is_searched_again(tmp_path: Path) -> None:
    job = job_of((*SEARCHED, "mesh.dp_replicate=4"))
    found = export_plan(job.plan, "run.toml", job)
    assert not found.beside
    assert load_job(written(found, tmp_path)).plan == job.plan


def test_rows_of_another_search_are_a_file_beside(tmp_path: Path) -> None:
    plan = job_of((*SEARCHED, "mesh.dp_replicate=4")).plan
    pipeline = replace(plan.layout.pipeline, schedule="file")
    other = replace(plan, layout=replace(plan.layout, pipeline=pipeline))
    found = export_plan(other, "run.toml")
    assert list(found.beside) == ["schedule.csv"]
    assert load_job(written(found, tmp_path)).plan == other


def test_a_cluster_that_is_no_preset_is_a_file_beside(tmp_path: Path) -> None:
    plan = job_of(("mesh.dp_replicate=2",)).plan
    cluster = replace(plan.cluster, name="mine", nodes=1)
    (tmp_path / "mine.toml").write_text("# mine\n" + cluster_toml(cluster), encoding="utf-8")
    job = job_of(("mesh.dp_replicate=2", f"cluster.file={tmp_path / 'mine.toml'}"))
    for found in (export_plan(job.plan, "run.toml", job), export_plan(job.plan, "run.toml")):
        (folder := tmp_path / str(len(found.beside["cluster.toml"]))).mkdir()
        assert load_job(written(found, folder)).plan == job.plan
    assert export_plan(job.plan, "megatron", job).beside["cluster.toml"].startswith("# mine")
    (tmp_path / "mine.toml").unlink()
    with pytest.raises(ConfigError, match="no-such-file"):
        export_plan(job.plan, "run.toml", job)


def test_a_plan_that_breaks_a_rule_cannot_be_written() -> None:
    plan = job_of(()).plan
    layout = replace(plan.layout, microbatch_sequences=3)
    broken: Plan = replace(plan, layout=layout)
    with pytest.raises(ConfigError, match="batch-divides"):
        export_plan(broken, "run.toml")
