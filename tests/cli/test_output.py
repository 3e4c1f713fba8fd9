"""Pages fit 80 columns where no terminal says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.planner.view.text_layout import WIDTH

NAME = "--set=train.run_name=" + "a-long-name-of-an-experiment-" * 4
EXPERTS = (
    "mixtral-8x7b",
    *("cluster.preset=256xh100", "mesh.pp=2", "mesh.dp_shard=128", "mesh.ep=8", "zero.stage=1"),
    *("batch.global_sequences=131072", "batch.sequence_length=8192"),
)
DENSE = (
    "llama3-70b",
    "cluster.preset=512xh100",
    *("mesh.tp=8", "mesh.pp=4", "mesh.dp_shard=16", "zero.stage=3", "precision.parameters=bf16"),
)
HALVES = ("nano", "mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints, every line of which fits."""
    # A page is also that of a run that does not fit into its devices.
    assert main([*words]) in (0, 1)
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    return text


@pytest.mark.quick("nano", "llama3-70b")
@pytest.mark.parametrize("run", [EXPERTS, DENSE, HALVES], ids=lambda run: run[0])
def test_the_page_of_a_plan_fits(
    run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    preset, *settings = run
    flags = [f"--set={setting}" for setting in settings]
    shown(capsys, "plan", preset, *flags, NAME)


def test_the_page_of_a_search_fits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--objective", "front", "--price", "123456789.125", "--detail")
    text = shown(capsys, "plan", "nano", "--cluster", "8xgb200", *flags, NAME)
    assert "for a million tokens" in text


def test_the_pages_of_an_import_and_of_a_comparison_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "zero.json"
    stage = {
        "stage": 3,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    file.write_text(json.dumps({"zero_optimization": stage, "train_micro_batch_size_per_gpu": 1}))
    text = shown(capsys, "import", str(file), "--ranks", "4", "--out", "a.toml")
    assert "zero.stage = 3" in text
    assert "stage3_gather_16bit_weights_on_model_save" in text
    shown(capsys, "compare", "a.toml", "nano")
    shown(capsys, "compare", "mixtral-8x7b", "llama3-8b-zero3")
