"""Loading: layers, sources, presets, --set, and the job that comes out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echelon.config.job import Job
from echelon.config.load import load_job, run_name_of
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.mesh import Mesh
from tests.config.problems import SMALL, problems_of, write

ROOT = Path(__file__).resolve().parents[2]


def source_of(job: Job, key: str) -> str:
    return next(setting.source for setting in job.sources if setting.key == key)


def test_the_demo_is_eight_ranks_in_three_dimensions() -> None:
    job = load_job(ROOT / "examples" / "nano.toml")
    plan = job.plan
    assert plan.mesh == Mesh(pp=2, dp_replicate=2, tp=2)
    assert plan.layout.sequence_parallel
    assert plan.layout.pipeline.schedule == "1f1b"
    assert plan.layout.pipeline.stages == ((0, 1), (2, 3))
    assert plan.num_microbatches >= 4
    assert plan.cluster.num_devices == plan.mesh.world_size
    assert plan.cluster.backend == "gloo"
    assert plan.name == job.train.run_name == "nano"
    assert plan.mathematics.optimizer.total_steps == job.train.steps
    assert job.data.source == "stdlib"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_example_takes_every_stage_of_zero_as_it_says(stage: int) -> None:
    sets = ["mesh.dp_replicate=1", "mesh.dp_shard=2", f"zero.stage={stage}"]
    for more in ([], ["zero.optimizer_offload=host"], ["precision.parameters=bf16"]):
        plan = load_job(ROOT / "examples" / "nano.toml", [*sets, *more]).plan
        assert plan.mesh == Mesh(pp=2, dp_shard=2, tp=2)
        assert plan.layout.zero.stage == stage


def test_a_value_of_a_later_layer_wins_and_says_where_it_was_set(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "nano"\n[train]\nsteps = 40\n[mesh]\ntp = 2\n', "base.toml")
    run = write(
        tmp_path,
        """
        extends = "base.toml"

        [mesh]
        dp_replicate = 2
        [optimizer]
        warmup_steps = 7
        """,
    )
    job = load_job(run, ["optimizer.warmup_steps=9", "data.validation_fraction=0.05"])
    assert job.plan.mesh == Mesh(dp_replicate=2, tp=2)
    assert job.plan.mathematics.optimizer.warmup_steps == 9
    assert source_of(job, "optimizer.warmup_steps") == "--set optimizer.warmup_steps=9"
    assert source_of(job, "mesh.dp_replicate") == f"{run}:4"
    assert source_of(job, "mesh.tp") == f"{tmp_path / 'base.toml'}:5"
    assert source_of(job, "model.layers") == "preset nano"
    assert source_of(job, "mesh.pp") == "default"
    assert source_of(job, "model.head_dim") == "derived: hidden / heads"
    assert source_of(job, "pipeline.stages") == "derived: one stage holds every block"


def test_a_field_of_ones_own_overrides_a_preset_and_the_model_is_called_changed() -> None:
    job = load_job("llama3-8b", ["model.layers=4"])
    assert job.plan.model.layers == 4
    assert job.plan.model.hidden == 4096
    assert job.plan.model.name == "llama3-8b-changed"
    assert load_job("llama3-8b").plan.model.name == "llama3-8b"


def test_naming_a_model_replaces_the_whole_model_of_the_layers_below(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        'extends = "nano"\n[model]\npreset = "gpt2"\n[batch]\nsequence_length = 64\n',
    )
    model = load_job(run).plan.model
    assert (model.name, model.positions, model.vocab) == ("gpt2", "learned", 50257)


def test_set_takes_toml_values_and_bare_words() -> None:
    job = load_job(
        "nano",
        [
            "optimizer.schedule=linear",
            "optimizer.learning_rate=1e-3",
            "mesh.pp=2",
            "pipeline.stages=[[0], [1, 2, 3]]",
            "optimizer.clip_norm=none",
            "train.run_name=2024-11-21",
            "observe.events=false",
        ],
    )
    optimizer = job.plan.mathematics.optimizer
    assert (optimizer.schedule, optimizer.learning_rate) == ("linear", 1e-3)
    assert optimizer.clip_norm is None
    assert job.plan.layout.pipeline.stages == ((0,), (1, 2, 3))
    assert job.train.run_name == "2024-11-21"
    assert job.observe.events is False


def test_paths_are_taken_from_the_file_that_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path / "inner", 'extends = "nano"\n[data]\nsource = "text"\n')
    assert load_job(run).data.source == str(tmp_path / "inner" / "text")
    assert load_job(run, ["data.source=other"]).data.source == str(tmp_path / "other")
    assert load_job(run, ["data.source=stdlib"]).data.source == "stdlib"


def test_whole_numbers_stand_for_numbers_and_become_floats() -> None:
    optimizer = load_job("nano", ["optimizer.weight_decay=0"]).plan.mathematics.optimizer
    assert isinstance(optimizer.weight_decay, float)


def test_a_job_survives_json() -> None:
    job = load_job("nano", ["mesh.tp=2", "mesh.pp=2", "checkpoint.keep=all"])
    assert Job.from_json(job.to_json()) == job
    assert Job.from_ranks(job.for_ranks()) == job
    assert Job.from_json(job.to_json()).content_hash() == job.content_hash()


def test_the_hash_is_of_the_content_and_not_of_where_it_was_set(tmp_path: Path) -> None:
    run = write(tmp_path, 'extends = "nano"\n[train]\nsteps = 50\n', "nano.toml")
    here, there = load_job(run), load_job("nano", ["train.steps=50"])
    assert here.sources != there.sources
    assert here.content_hash() == there.content_hash()
    other = dataclasses.replace(here, train=dataclasses.replace(here.train, steps=51))
    assert other.content_hash() != here.content_hash()
    assert load_job(run, ["mesh.tp=2"]).content_hash() != here.content_hash()


def test_intervals_count_steps_that_are_done() -> None:
    sets = ["train.steps=35", "train.validate_every=10", "checkpoint.every=never"]
    job = load_job("nano", sets)
    assert [n for n in range(1, 36) if job.train.validates_after(n)] == [10, 20, 30, 35]
    assert not any(job.checkpoint.saves_after(n) for n in range(1, 36))
    job = load_job("nano", ["train.validate_every=never", "checkpoint.every=3"])
    assert [n for n in range(1, 10) if job.checkpoint.saves_after(n)] == [3, 6, 9]
    assert not any(job.train.validates_after(n) for n in range(1, job.train.steps + 1))


def test_a_run_is_named_after_its_file() -> None:
    assert run_name_of("runs/My run (2).toml") == "My-run-2-"
    assert run_name_of("llama3.1-405b") == "llama3.1-405b"
    assert run_name_of(Path("...toml")) == "run"


def test_an_explicit_model_needs_no_preset(tmp_path: Path) -> None:
    plan = load_job(write(tmp_path, SMALL)).plan
    assert plan.model.head_dim == 4
    assert plan.num_microbatches == 48
    assert plan.cluster.name == "laptop"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        SMALL
        + """
        [mesh]
        tp = "2"
        pp = 0
        dp_replicate = 5
        dp_shrad = 2
        [optimizer]
        schedule = "cosin"
        [recompute]
        policy = "selective"
        [mash]
        x = 1
        """.replace("\n        ", "\n"),
    )
    found = problems_of(run, ["zero.stage=3", "model.kv_heads=7"])
    assert set(found) == {
        "kv-heads-divide-heads",
        "wrong-type",
        "degree-at-least-one",
        "unknown-key",
        "unknown-choice",
        "not-built-yet",
        "batch-divides",
        "zero-shares-out",
    }


def test_the_kind_of_error_says_whether_single_values_are_wrong(tmp_path: Path) -> None:
    run = write(tmp_path, SMALL)
    with pytest.raises(InfeasiblePlan):
        load_job(run, ["mesh.tp=4"])
    with pytest.raises(ConfigError) as caught:
        load_job(run, ["mesh.tp=4", "mesh.pp=0"])
    assert not isinstance(caught.value, InfeasiblePlan)
    assert "tp-divides-kv-heads" in caught.value.rules
