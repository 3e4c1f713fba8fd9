"""A model without a cluster: the GPUs of this machine, or four sizes of common ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.launch import gpus
from echelon.launch.gpus import DriverGpus, own_cluster
from echelon.planner.search.request import asks_what_exists

GB = 10**9


def _machine(monkeypatch: pytest.MonkeyPatch, *names: str, memory_bytes: int = 80 * GB) -> None:
    found = DriverGpus(driver="1", gpus=tuple((name, memory_bytes) for name in names))
    monkeypatch.setattr(gpus, "find_driver_gpus", lambda: found)


@pytest.mark.slow
def test_without_gpus_four_sizes_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch)
    small = ["--set", "model.layers=4", "--set", "batch.global_sequences=16"]
    assert main(["plan", "llama3-8b", *small]) == 0
    page = capsys.readouterr().out
    assert all(len(line) <= 80 for line in page.splitlines())
    assert [f"{count}xh100" in page for count in (1, 2, 4, 8, 16)] == [True] * 4 + [False]
    assert main(["plan", "llama3-8b", *small, "--pin", "tp=1", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert [one["devices"] for one in sizes] == [1, 2, 4, 8]
    assert {one["plans"][0]["mesh"]["tp"] for one in sizes} == {1}
    assert all(one["recommended"]["fits"] > 0.9 for one in sizes)


@pytest.mark.slow
def test_with_gpus_their_cluster_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch, *["NVIDIA H100 80GB HBM3"] * 2)
    arguments = ["plan", "llama3-8b", "--set", "batch.global_sequences=16", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["search"]["cluster"] == "2xh100"
    _machine(monkeypatch, "NVIDIA A100-SXM4-40GB", memory_bytes=40 * GB)
    assert main(arguments) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["works"][0] == "--cluster 2xa100-40gb"


def test_most_devices_of_a_kind_are_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, "NVIDIA L40S", *["NVIDIA GeForce RTX 4090"] * 2)
    assert own_cluster().name == "2xrtx4090"
    # Eight are a node, and ten no whole number of nodes.
    _machine(monkeypatch, *["NVIDIA GeForce RTX 4090"] * 10)
    assert own_cluster().name == "8xrtx4090"


def test_a_device_that_nobody_knows_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch, "NVIDIA Unheard Of")
    assert own_cluster().name is None
    small = ["--set", "model.layers=4", "--set", "batch.global_sequences=16"]
    assert main(["plan", "llama3-8b", *small]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "1 x NVIDIA Unheard Of of this machine is not in the catalogue" in page


@pytest.mark.parametrize(
    "flags",
    [["--why"], ["--detail"], ["--objective", "front"], ["--out", "a.toml"], ["--out", "a/"]],
)
def test_what_is_about_one_plan_needs_a_cluster(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch)
    assert main(["plan", "llama3-8b", *flags]) == 2
    assert "--cluster 8xh100" in capsys.readouterr().err


def test_a_search_in_which_nothing_fits_is_a_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama3-8b", "--cluster", "1xa100-40gb"]) == 1
    assert "error[plan-fits-memory]" in capsys.readouterr().err
    _machine(monkeypatch)
    never = ["--pin", "pp=1", "--pin", "tp=1", "--set", "batch.global_sequences=1"]
    huge = ["--pin", "cp=1", "--set", "model.hidden=1048576", "--pin", "microbatch=1"]
    assert main(["plan", "llama3-8b", *never, *huge]) == 1
    assert "no cluster of common devices has a plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "settings", "asks"),
    [
        ("llama3-8b", (), True),
        ("llama3-405b", ("batch.global_sequences=8",), True),
        ("llama3-8b", ("mesh.tp=2",), False),
        ("llama3-8b", ("cluster.preset=8xh100",), False),
        ("nano", (), False),
        ("run.toml", (), False),
    ],
)
def test_only_a_model_without_devices_and_layout_asks(
    run: str, settings: tuple[str, ...], asks: bool
) -> None:
    assert asks_what_exists(run, settings) == asks


def test_a_config_json_asks_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert asks_what_exists(str(tmp_path), ())
