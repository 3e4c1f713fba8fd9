"""A plan is that of the run with settings on top, or the answer of a search; mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast, get_args

import pytest

import echelon as ec
from echelon.api.planning import ModelName
from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from echelon.launch import gpus
from echelon.launch.gpus import DriverGpus
from echelon.launch.local.rank_processes import RankProcesses
from echelon.planner.recommend import recommend as sizes_of_models
from echelon.planner.search import search as searching


def test_a_plan_is_that_of_the_run_with_settings_on_top() -> None:
    plan = ec.plan("nano", settings=["mesh.tp=2"])
    assert plan == load_job("nano", ["mesh.tp=2"]).plan
    assert isinstance(plan, ec.Plan)
    assert ec.plan("nano", settings=["cluster.preset=8xh100"]).cluster.backend == "nccl"
    assert ec.plan("nano", batch=8) == ec.plan("nano", settings="batch.global_sequences=8")
    assert ec.plan("nano", batch={"sequence_length": 64}).mathematics.sequence_length == 64


def test_every_mistake_is_in_the_error() -> None:
    with pytest.raises(ec.EchelonError) as caught:
        ec.plan("nano", settings=["mesh.tp=3", "mesh.pp=9"])
    assert {"tp-divides-heads", "layers-fill-stages"} <= set(caught.value.rules)


@pytest.mark.slow
def test_a_model_on_a_cluster_is_the_answer_of_a_search() -> None:
    answer = ec.plan("llama3-8b", "8xh200")
    assert isinstance(answer, ec.PlanAnswer)
    assert answer.plan.mesh.world_size == 8
    assert ec.plan("llama3-8b", "8xh200", pins=["tp=4"]).plan.mesh.tp == 4
    # So small a model takes the shortest step on one device: the others stay idle.
    small = ec.plan("nano", cluster="8xh100")
    assert (small.plan.mesh.world_size, small.idle_devices) == (1, 7)
    assert ec.plan("nano", "8xh100", pins=["devices=8"]).plan.mesh.world_size == 8


@pytest.fixture(name="small_model")
def _small_model(tmp_path: Path) -> Path:
    """Return the config.json of a model that is searched quickly."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 2, "intermediate_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    more = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**kind, **sizes, **heads, **more}))
    return file


@pytest.mark.slow
def test_a_model_alone_is_planned_on_what_exists_here(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = DriverGpus(driver="1", gpus=(("NVIDIA H100 80GB HBM3", 80 * 10**9),) * 2)
    monkeypatch.setattr(gpus, "find_driver_gpus", lambda: two)
    # A type checker knows no other models than those of presets.
    model = cast("Any", small_model)
    answer = ec.plan(model, trainer="Megatron-LM")
    assert isinstance(answer, ec.PlanAnswer)
    assert answer.found.answer.request.cluster.name == "2xh100"
    assert answer.found.answer.request.trainer == "megatron-core-2025"
    monkeypatch.setattr(gpus, "find_driver_gpus", DriverGpus)
    sizes = ec.plan(model, batch=16)
    assert isinstance(sizes, ec.SizesAnswer)
    assert [*sizes] == ["1xh100", "2xh100", "4xh100", "8xh100"]
    assert sizes["2xh100"].plan.mathematics.global_sequences == 16


def test_what_a_model_runs_on_or_how_it_is_split_makes_it_a_run() -> None:
    assert isinstance(ec.plan("llama3-8b", settings=["mesh.tp=2"]), ec.Plan)
    run = ec.plan("llama3-8b", settings=["cluster.preset=8xh100"])
    assert isinstance(run, ec.Plan)
    assert run.mesh.world_size == 1
    assert isinstance(ec.plan("nano"), ec.Plan)


def test_a_model_that_no_size_can_run_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_driver_gpus", DriverGpus)
    monkeypatch.setattr(sizes_of_models, "smallest_that_fits", lambda request: None)
    with pytest.raises(ec.InfeasiblePlan, match="no cluster of common devices has a plan"):
        ec.plan("llama3-8b", pins=["tp=1"])


def test_models_that_a_type_checker_knows_are_those_that_there_are() -> None:
    models = {*preset_names("models")} - {*preset_names("runs")}
    assert {*get_args(ModelName)} == models


def test_a_run_is_searched_on_its_own_cluster(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n[cluster]\npreset = "4xcpu"\n[mesh]\ntp = 2\n')
    assert ec.plan(run).mesh.tp == 2
    answer = ec.plan(run, search=True, pins="devices=4")
    assert answer.plan.cluster.name == "4xcpu"
    assert answer.plan.mesh.world_size == 4


def test_the_trainer_and_the_batch_are_those_that_are_asked_for() -> None:
    answer = ec.plan("llama3-8b", "8xh100", trainer="megatron-core", batch=64, pins=["cp=1"])
    assert answer.plan.mathematics.global_sequences == 64
    assert "by megatron-core" in " ".join(str(answer).split())
    batch = {"global_sequences": 32, "sequence_length": 4096, "microbatch_sequences": 2}
    other = ec.plan("llama3-8b", "8xh100", batch=batch, pins=["cp=1"]).plan
    assert other.mathematics.sequence_length == 4096
    assert other.layout.microbatch_sequences == 2


def test_a_path_is_the_file_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        ec.plan("nano", Path("8xh100"))
    assert caught.value.rules == ("no-such-file",)


@pytest.mark.parametrize(
    ("words", "rule", "set_by", "works"),
    [
        ({"cluster": "8xh10"}, "unknown-preset", 'cluster="8xh10"', "8xh100"),
        ({"trainer": "megatorn"}, "unknown-trainer", 'trainer="megatorn"', "megatron"),
        ({"objective": "speed"}, "bad-argument", 'objective="speed"', 'objective="time"'),
        ({"objective": "cost"}, "objective-needs-price", 'objective="cost"', "price=2.5"),
        ({"price": -2.5}, "bad-argument", "price=-2.5", "price=2.5"),
        ({"price": float("nan")}, "bad-argument", "price=nan", "price=2.5"),
        ({"batch": 0}, "out-of-range", "batch=0", "1"),
        ({"batch": 1.5}, "wrong-type", "batch=1.5", "2"),
        ({"batch": {"sequences": 4}}, "unknown-key", "batch={'sequences': 4}", "global_sequences"),
        ({"trainer": None}, "unknown-trainer", 'trainer="None"', "generic"),
        ({"price": "dear"}, "bad-argument", "price='dear'", "price=2.5"),
        ({"pins": {"tp": 2}}, "bad-argument", "pins={'tp': 2}", 'pins=["tp=8"]'),
        ({"settings": [3]}, "bad-argument", "settings=[3]", 'settings=["mesh.tp=8"]'),
        ({"settings": ["mesh.tp=3"]}, "pin-excludes-everything", 'settings=["mesh.tp=3"]', "tp=1"),
        ({"pins": ["tp=1", "tp=2"]}, "bad-argument", 'pins=["tp=2"]', 'pins=["tp=1,2"]'),
        ({"pins": ["tq=8"]}, "unknown-pin", 'pins=["tq=8"]', "tp"),
        ({"pins": ["tp=3"]}, "pin-excludes-everything", 'pins=["tp=3"]', 'pins=["tp=1"]'),
        ({"settings": ["steps"]}, "set-syntax", 'settings=["steps"]', ""),
        (
            {"batch": 64, "settings": ["batch.global_sequences=32"]},
            "conflicting-settings",
            'batch=64, settings=["batch.global_sequences=32"]',
            "",
        ),
    ],
)
def test_a_mistake_names_what_was_given_and_what_works(
    words: dict[str, Any], rule: str, set_by: str, works: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.plan("nano", **{"cluster": "8xh100", **words})
    problem = caught.value.problems[0]
    assert (problem.rule, problem.set_by) == (rule, set_by)
    assert works in " ".join(problem.suggestions)


@pytest.mark.parametrize(
    "words",
    [{"pins": ["tp=2"]}, {"trainer": "torchtitan"}, {"objective": "devices"}, {"price": 2.5}],
)
def test_what_is_about_a_search_is_refused_without_one(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is about a search") as caught:
        ec.plan("nano", **words)
    assert caught.value.rules == ("bad-argument",)
    assert caught.value.problems[0].suggestions == ('cluster="8xh100"', "search=True")


@pytest.mark.slow
def test_what_cannot_run_is_infeasible() -> None:
    with pytest.raises(ec.InfeasiblePlan) as caught:
        ec.plan("llama3-8b", "8xh200", pins=["pp=64"])
    assert caught.value.rules == ("pin-excludes-everything",)
    with pytest.raises(ec.InfeasiblePlan) as caught:
        ec.plan("llama3-8b", "1xrtx4090")
    assert caught.value.rules == ("plan-fits-memory",)
    assert caught.value.problems[0].suggestions[0].startswith('cluster="')


def test_a_search_that_is_interrupted_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "walk_worlds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ec.plan("nano", "8xh100")


@pytest.mark.slow
def test_a_plan_is_proven() -> None:
    proof = ec.prove(ec.plan("nano", settings=["mesh.dp_replicate=2"]))
    assert proof.proven
    assert proof.mesh == "dp2"
    assert proof.independent is None


@pytest.mark.slow
def test_the_one_process_is_proven_too() -> None:
    proof = ec.prove(ec.plan("nano"), independent=True)
    assert proof.proven
    assert proof.independent is not None
    assert proof.independent.holds


def test_nothing_is_started_for_an_engine_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[RankProcesses] = []
    monkeypatch.setattr(RankProcesses, "begin", started.append)
    with pytest.raises(ConfigError, match="prove-subject"):
        ec.prove(ec.plan("nano"), subject="tests.cli.absent:build")
    assert started == []
