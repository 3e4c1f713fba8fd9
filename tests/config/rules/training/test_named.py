"""A run that trains names its data: a preset of a model and the file of a search do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec
from echelon.api.given_plan import job_of_plan
from echelon.api.training import train_job
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.config.rules.training import WAYS, data_problems
from echelon.core.errors import ConfigError
from echelon.interop.export import export_plan

MIXTURE = 'data.mixture=[{path="a.txt", weight=1.0}, {path="b.txt", weight=1.0}]'


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        ("nano", ()),
        ("llama3-8b-zero3", ()),
        ("gpt2", ("data.source=stdlib",)),
        ("gpt2", ("data.source=words.txt",)),
        ("gpt2", ("data.source=https://host/words.txt",)),
        ("gpt2", (MIXTURE,)),
    ],
)
def test_a_preset_of_a_run_or_a_setting_names_the_data(run: str, settings: tuple[str, ...]) -> None:
    assert data_problems(load_job(run, settings)) == []


@pytest.mark.parametrize("settings", [(), ("data.tokenizer=bpe-300",), ("train.steps=5",)])
def test_a_preset_of_a_model_does_not(settings: tuple[str, ...]) -> None:
    (problem,) = data_problems(load_job("gpt2", settings))
    assert problem.rule == "data-is-named"
    assert problem.suggestions == WAYS
    for way in ('"stdlib"', "PATH", "URL", "echelon data prepare"):
        assert any(way in suggestion for suggestion in problem.suggestions)


def test_the_command_asks_for_data_with_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gpt2", "--set", "model.layers=1"]) == 2
    assert capsys.readouterr().err.startswith("error[data-is-named]: data.source is not set")


def test_a_plan_has_no_data_of_its_own() -> None:
    plan = ec.plan("nano")
    with pytest.raises(ConfigError, match="data-is-named"):
        ec.train(plan)
    with pytest.raises(ConfigError, match="data-is-named"):
        train_job(job_of_plan(plan, None))
    assert data_problems(job_of_plan(plan, "stdlib")) == []


def test_the_file_of_a_search_plans_and_asks_for_data_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    search = ["plan", "nano", "--cluster", "2xcpu", "--out", str(file)]
    assert main(search) == 0
    assert "data" not in file.read_text()
    assert main(["plan", str(file)]) == 0
    capsys.readouterr()
    assert main(["train", str(file)]) == 2
    assert "error[data-is-named]" in capsys.readouterr().err


def test_an_export_goes_on_naming_what_was_chosen(tmp_path: Path) -> None:
    for run, named in (("nano", True), ("gpt2", False)):
        job = load_job(run)
        text = export_plan(job.plan, "run.toml", job).text
        assert ('source = "stdlib"' in text) is named
        file = tmp_path / f"{run}.toml"
        file.write_text(text)
        assert bool(data_problems(load_job(file))) is not named
