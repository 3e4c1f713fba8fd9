"""This tree beside an earlier one: ratios of turns side by side, and a tree that does not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.before import Change, main, measure
from bench.harness.catalogue import ROOT
from bench.harness.ranks import Measurement
from bench.harness.spec import MODES, SIZES

TURN = Measurement(
    step_s=1.0,
    cpu_s=2.0,
    sent_bytes=None,
    uplink_bytes=None,
    peak_bytes=100,
    first_loss=None,
    last_loss=None,
)


def test_a_ratio_is_that_of_two_turns_side_by_side() -> None:
    # The machine was twice as slow in the second round: no ratio shows it.
    now = [replace(TURN, cpu_s=2.02), replace(TURN, cpu_s=4.04)]
    before = [TURN, replace(TURN, cpu_s=4.0)]
    change = Change(mode=MODES["dp2"], now=now, before=before, failures=[])
    assert change.ratios("cpu_s") == pytest.approx([1.01, 1.01])
    assert change.met
    assert "1.010 (1.010, 1.010)" in change.line()
    slower = replace(change, now=[replace(one, cpu_s=1.03 * one.cpu_s) for one in before])
    assert not slower.met
    assert slower.line().endswith("MISSED")


@pytest.mark.slow
def test_both_trees_take_turns(tmp_path: Path) -> None:
    taken = measure(MODES["dp2"], SIZES["tiny"], ROOT, rounds=1, logs=tmp_path)
    assert not taken.failures
    assert taken.now[0].last_loss == taken.before[0].last_loss


@pytest.mark.slow
def test_a_tree_that_does_not_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "bench" / "harness").mkdir(parents=True)
    (tmp_path / "bench" / "harness" / "rank.py").write_text("raise SystemExit('broken')\n")
    taken = measure(MODES["dp2"], SIZES["tiny"], tmp_path, rounds=1, logs=tmp_path)
    assert not taken.met
    assert "broken" in taken.line()


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "it has no bench/harness/rank.py" in capsys.readouterr().err
