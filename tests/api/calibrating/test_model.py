"""`ec.calibrate_model`: refused before anything is measured, and a file that is there is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import echelon as ec


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a measurement is begun."""

    def measure(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("echelon.training.measure.trainer.measure_units", measure)


@pytest.mark.parametrize(
    ("out", "rule", "works"),
    [
        ("no/such/times.json", "cannot-write", ()),
        ("there.txt/times.json", "cannot-write", ()),
        (".", "unit-times-written-once", ("--out times-2.json",)),
        ("folder", "unit-times-written-once", ("--out folder/times.json",)),
        ("times.json", "unit-times-written-once", ("--out times-2.json",)),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, rule: str, works: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there.txt", "times.json"):
        Path(name).write_text("mine")
    Path("folder").mkdir()
    with pytest.raises(ec.EchelonError) as caught:
        ec.calibrate_model("nano", out=out)
    assert caught.value.rules == (rule,)
    (problem,) = caught.value.problems
    assert problem.suggestions == works
    assert problem.key == "--out"
    assert Path("times.json").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_cpu_cores_are_not_measured_for_gpus(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    with pytest.raises(ec.EchelonError) as caught:
        ec.calibrate_model("nano", settings=["cluster.preset=8xh100"], out=out)
    assert caught.value.rules == ("enough-devices",)
    assert not out.exists()
