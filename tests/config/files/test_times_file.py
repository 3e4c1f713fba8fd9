"""Measured times of a model's units: read from their file, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.files.measurements import (
    FITTED,
    PASSES,
    UNITS,
    fitted_settings,
    read_times,
    unit_times_from_job,
)
from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from tests.config.measured import times_file
from tests.config.problems import problems_of, write
from tests.config.suggestions import taken

DEEP = ["model.layers=8", 'model.name="deep"']


@pytest.mark.slow
def test_measured_times_balance_stages(tmp_path: Path) -> None:
    sets = [*DEEP, "mesh.pp=2"]
    plan = load_job("nano", sets).plan
    path = times_file(plan, tmp_path / "times.json", head=4.0)
    job = load_job("nano", [*sets, f"pipeline.times={path}"])
    assert [len(stage) for stage in job.plan.layout.pipeline.stages] == [6, 2]
    source = job.source_of("pipeline.stages")
    assert source == (
        "derived: balanced by measured times, slowest rank 1.00x of the mean (even split 1.33x)"
    )
    times = unit_times_from_job(job)
    assert (times.source, times.where) == ("measured", str(path))
    assert times.forward_s["layers.7"] == 1e-3
    assert times.whole_backward_s["head"] == pytest.approx(16e-3)
    # The stages are written out, and what they were balanced by is left out.
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.plan == job.plan
    searched = load_job("nano", [*sets, f"pipeline.times={path}", "pipeline.schedule=auto"])
    assert f'times = "{path}"' in resolved_toml(searched)
    twice = load_job(write(tmp_path, resolved_toml(searched)))
    assert twice.content_hash() == searched.content_hash()


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("batch.microbatch_sequences=4", "batch.microbatch_sequences = 2"),
        ("batch.sequence_length=64", "batch.sequence_length = 128"),
        ("model.ffn=256", "model.ffn = 352"),
        ("mesh.tp=2", "mesh.tp = 1"),
        ("model.causal=false", "model.causal = true"),
        ("model.window=64", 'model.window = "none"'),
        ("model.soft_cap=30", 'model.soft_cap = "none"'),
    ],
)
def test_times_of_another_model_or_microbatch_are_refused(
    tmp_path: Path, setting: str, advice: str
) -> None:
    plan = load_job("nano", ["mesh.pp=2"]).plan
    path = times_file(plan, tmp_path / "times.json")
    sets = ["mesh.pp=2", f"pipeline.times={path}"]
    assert problems_of("nano", sets) == {}
    found = problems_of("nano", [*sets, setting])
    assert list(found) == ["unit-times-fit-run"]
    problem = found["unit-times-fit-run"]
    assert problem.suggestions[0] == advice
    assert problems_of("nano", taken(advice, [*sets, setting])) == {}


def test_a_context_rank_has_its_share_of_the_times_of_a_whole_sequence(tmp_path: Path) -> None:
    whole = [*DEEP, "mesh.pp=2", "model.window=64", "model.soft_cap=30"]
    path = times_file(load_job("nano", whole).plan, tmp_path / "times.json")
    first, shared = (
        unit_times_from_job(load_job("nano", [*whole, f"pipeline.times={path}", *more]))
        for more in ([], ["mesh.cp=4"])
    )
    assert shared.forward_s["layers.0"] == first.forward_s["layers.0"] / 4
    assert shared.whole_backward_s["head"] == first.whole_backward_s["head"] / 4


def test_every_setting_is_demanded_of_a_file(tmp_path: Path) -> None:
    path = times_file(load_job("nano").plan, tmp_path / "times.json")
    whole = json.loads(path.read_text())
    assert tuple(whole["fits"]) == FITTED
    for key in FITTED:
        fits = {one: value for one, value in whole["fits"].items() if one != key}
        path.write_text(json.dumps({**whole, "fits": fits}))
        with pytest.raises(ConfigError, match=f"fits has no {key}"):
            read_times(path)


def test_true_is_not_the_number_one(tmp_path: Path) -> None:
    path = times_file(load_job("nano").plan, tmp_path / "times.json")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "fits": {**whole["fits"], "mesh.tp": True}}))
    assert list(problems_of("nano", ["mesh.pp=2", f"pipeline.times={path}"])) == [
        "unit-times-fit-run"
    ]


@pytest.mark.parametrize("setting", ["mesh.tp=x", "model.hidden=-1", "batch.sequence_length=[]"])
def test_a_setting_that_is_wrong_is_told_once(tmp_path: Path, setting: str) -> None:
    path = times_file(load_job("nano").plan, tmp_path / "times.json")
    sets = ["mesh.pp=2", f"pipeline.times={path}", setting]
    assert "unit-times-fit-run" not in problems_of("nano", sets)
    assert problems_of("nano", sets).keys() == problems_of("nano", [setting]).keys()


def test_times_of_another_kind_of_device_are_refused(tmp_path: Path) -> None:
    plan = load_job("nano", ["mesh.pp=2"]).plan
    cpu = times_file(plan, tmp_path / "cpu.json")
    gpu = times_file(plan, tmp_path / "gpu.json", device="NVIDIA H100 80GB HBM3")
    gpus = "cluster.preset=8xh100"
    fp32 = "precision.parameters=fp32"
    assert problems_of("nano", ["mesh.pp=2", f"pipeline.times={cpu}"]) == {}
    assert problems_of("nano", ["mesh.pp=2", gpus, fp32, f"pipeline.times={gpu}"]) == {}
    for path, cluster in ((cpu, [fp32, gpus]), (gpu, [fp32])):
        sets = ["mesh.pp=2", *cluster, f"pipeline.times={path}"]
        found = problems_of("nano", sets)
        assert list(found) == ["unit-times-fit-run"]
        problem = found["unit-times-fit-run"]
        assert f"{path} was measured on " in problem.message
        assert all(setting in problem.set_by for setting in sets[2:])
        assert problems_of("nano", taken(problem.suggestions[0], sets)) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 1},
        {"seconds": {}},
        {"seconds": {unit: {"forward_s": 1.0} for unit in UNITS}},
        {"seconds": {unit: dict.fromkeys(PASSES, -1.0) for unit in UNITS}},
        {"seconds": {unit: dict.fromkeys(PASSES, 0.0) for unit in UNITS}},
        {"seconds": {unit: dict.fromkeys(PASSES, True) for unit in UNITS}},
        {"fits": []},
        {"fits": {}},
        {"fits": {"model.hidden": 64}},
        {"fits": {key: [] for key in FITTED}},
        {"fits": {**dict.fromkeys(FITTED, 1), "model.layers": 4}},
        {"threads": "many"},
        {"threads": None},
        {"threads": float("inf")},
        {"threads": 1.5},
        {"threads": True},
        {"threads": 0},
        {"model": None},
        {"device": None},
        {"device": ""},
        {"device": ["cpu"]},
        {"spread": {}},
        {"spread": dict.fromkeys(UNITS, "wide")},
        {"spread": dict.fromkeys(UNITS, float("nan"))},
        {"seconds": {unit: dict.fromkeys(PASSES, 10**400) for unit in UNITS}},
        {"seconds": {unit: dict.fromkeys(PASSES, float("inf")) for unit in UNITS}},
        {"seconds": {unit: None for unit in UNITS}},
        {"more": 1},
    ],
)
def test_a_file_that_holds_no_times_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = times_file(load_job("nano").plan, tmp_path / "times.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = problems_of("nano", ["mesh.pp=2", f"pipeline.times={path}"])
    assert list(found) == ["unit-times-readable"]
    assert found["unit-times-readable"].set_by == f"--set pipeline.times={path}"


@pytest.mark.parametrize("text", ["", "[]", "{", "1", "[" * 100_000, '{"schema": NaN}'])
def test_any_text_is_refused_by_rule(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="unit-times-readable"):
        read_times(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="unit-times-readable"):
        read_times(path)
    with pytest.raises(ConfigError, match="no-such-file"):
        read_times(tmp_path / "absent.json")


def test_times_know_what_they_were_measured_with(tmp_path: Path) -> None:
    plan = load_job("nano", ["mesh.tp=2"]).plan
    found = read_times(times_file(plan, tmp_path / "times.json"))
    assert found.fits == fitted_settings(plan)
    assert found.fits["mesh.tp"] == 2
    other = replace(plan, mathematics=replace(plan.mathematics, sequence_length=64))
    assert found.fits != fitted_settings(other)
