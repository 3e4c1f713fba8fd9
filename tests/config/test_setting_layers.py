"""Layers: files that extend others, presets and --set flags, and what is none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.config.setting_layers import gather_layers
from echelon.core.mesh import Mesh
from tests.config.problems import SMALL, problems_of, write


def source_of(job: Job, key: str) -> str:
    return next(setting.source for setting in job.sources if setting.key == key)


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


def test_an_unknown_run_lists_presets_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SMALL)
    (tmp_path / "cluster.toml").write_text("devices_per_node = 8")
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]")
    found = problems_of("nanoo")
    assert found["unknown-preset"].suggestions == ("nano", "run.toml")
    found = problems_of("zzz")
    kinds = ("a run.toml", "a preset (echelon config presets)")
    assert found["unknown-preset"].suggestions == (*kinds, "run.toml")
    assert problems_of("meta/Llama3-8B")["unknown-preset"].suggestions[0] == "llama3-8b"
    llamas = ("llama3-8b-zero3", "llama3-70b", "llama3-8b")
    assert problems_of("llama3")["unknown-preset"].suggestions[:3] == llamas
    assert list(problems_of("./gone")) == ["unknown-preset"]
    found = problems_of(write(tmp_path, 'extends = "gpt3"'))
    assert "gpt3-175b" in found["unknown-preset"].suggestions


@pytest.mark.parametrize("name", ["LLAMA3-8B", "llama-3-8b", "meta-llama/Meta-Llama-3-8B"])
def test_a_preset_has_one_name_in_many_spellings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = gather_layers(name, ())
    assert not layers.problems
    assert layers.merged()["model.preset"].value == "llama3-8b"
    assert gather_layers("nano", (f"model.preset={name}",)).problems == []
    (tmp_path / name).mkdir(parents=True)
    assert [one.rule for one in gather_layers(name, ()).problems] == [
        "no-such-file" if "/" in name else "unknown-preset"
    ]
    (tmp_path / "llama3-8b").mkdir()
    assert not gather_layers("llama3-8b", ()).problems


def test_a_file_cannot_extend_itself(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"', "a.toml")
    write(tmp_path, 'extends = "a.toml"', "b.toml")
    found = problems_of(tmp_path / "a.toml")
    assert list(found) == ["extends-cycle"]
    assert "a.toml -> b.toml -> a.toml" in found["extends-cycle"].message


@pytest.mark.parametrize("text", ["mesh.tp 2", "=2", "mesh..tp=2", "extends=gpt2", ""])
def test_set_is_key_and_value(text: str) -> None:
    assert list(problems_of("nano", [text])) == ["set-syntax"]


@pytest.mark.parametrize(
    "source",
    ["x" * 5000, "a\0b", "a\0.toml", "~nobody-here/run.toml", "no/such/place.toml", "/", "", "."],
)
def test_no_name_is_answered_by_anything_but_a_rule(source: str) -> None:
    assert set(problems_of(source)) <= {"no-such-file", "unknown-preset"}
    assert problems_of(source) != {}
