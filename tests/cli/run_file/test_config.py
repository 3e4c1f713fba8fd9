"""`echelon config` shows every value with its source, in forms that load again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.config.presets import preset_names


def test_every_setting_has_a_row_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nano", "--set", "mesh.tp=2"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == [row.key for row in load_job("nano", ["mesh.tp=2"]).sources]
    assert rows["mesh.tp"].split(maxsplit=2)[1:] == ["2", "--set mesh.tp=2"]
    assert rows["mesh.pp"].split(maxsplit=2)[1:] == ["1", "default"]
    assert rows["train.steps"].endswith("preset nano")


def test_json_holds_values_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nano", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plan_hash"] == load_job("nano").plan.content_hash()
    assert result["settings"]["mesh.pp"] == {"value": 1, "source": "default"}


def test_toml_gives_the_same_plan_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nano", "--set", "mesh.pp=2", "--toml"]) == 0
    path = tmp_path / "resolved.toml"
    path.write_text(capsys.readouterr().out)
    assert load_job(path).plan == load_job("nano", ["mesh.pp=2"]).plan


@pytest.mark.parametrize("name", ["8xh100", "16xH100", "128xgb200", "64xrtx4090+roce-100"])
def test_toml_of_a_cluster_gives_the_same_cluster_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--cluster", name, "--toml"]) == 0
    path = tmp_path / "my.toml"
    path.write_text(capsys.readouterr().out)
    known = load_job("nano", [f"cluster.preset={name}"]).plan
    assert load_job("nano", [f"cluster.file={path}"]).plan == known
    assert 'degree = "all"' in path.read_text()


def test_a_cluster_is_shown_as_rows_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--cluster", "16xh100"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert rows["nodes"] == "2"
    assert rows["links[1].name"] == '"InfiniBand NDR 400 Gb/s"'
    assert main(["config", "show", "--cluster", "16xh100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["devices_per_node"] == 8


def test_a_run_is_shown_on_another_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nano", "--cluster", "8xH100"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["cluster.preset"].split(maxsplit=2)[1:] == ['"8xH100"', "--cluster 8xH100"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([], "bad-argument"),
        (["--cluster", "8xh100", "--set", "mesh.tp=2"], "bad-argument"),
        (["--cluster", "8xh1000"], "unknown-preset"),
        (["--cluster", "gone.toml"], "no-such-file"),
    ],
)
def test_what_cannot_be_shown_is_one_error(
    arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *arguments]) == 2
    assert f"error[{rule}]" in capsys.readouterr().err


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["presets"]
    models = [entry["name"] for entry in listed if entry["kind"] == "model"]
    assert tuple(models) == preset_names("models")
    assert main(["config", "presets"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(listed) + 1
