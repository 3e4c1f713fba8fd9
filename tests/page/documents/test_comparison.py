"""The page of two plans side by side, and of two runs on one scale."""

from __future__ import annotations

from pathlib import Path

from echelon.api.comparing import compare
from echelon.config.load import load_job
from echelon.page.documents.comparison import comparison_page
from echelon.planner.view.document import BarsFigure, LinesFigure
from tests.page.documents.test_run import part, steps
from tests.telemetry.runs import make_run


def test_what_differs_stands_side_by_side() -> None:
    first = load_job("nano", ("mesh.dp_replicate=2",)).plan
    second = load_job("nano", ("mesh.dp_shard=2", "zero.stage=3")).plan
    found = compare(first, second)
    page = comparison_page(found, "nano", "other")
    assert page.good
    assert "another layout" in page.verdict
    table = part(page, "differences").table
    assert table is not None
    assert {row[0]: row[1:] for row in table.rows}["zero.stage"] == ("0", "3", "layout")
    held = part(page, "part-held").figure
    assert isinstance(held, BarsFigure)
    assert [row.total for row in held.rows] == [
        float(sum(side.held.values())) for side in (found.a, found.b)
    ]
    assert "loss" not in [one.id for one in page.sections]


def test_two_runs_stand_on_one_scale(tmp_path: Path) -> None:
    folders = []
    for name, count in (("one", 4), ("two", 6)):
        (tmp_path / name).mkdir()
        run = make_run(tmp_path / name)
        (run.path / "metrics.jsonl").write_text(steps(count))
        folders.append(str(run.path))
    page = comparison_page(compare(*folders), *folders)
    assert page.verdict == "The same mathematics and the same layout."
    loss = part(page, "loss")
    assert isinstance(loss.figure, LinesFigure)
    assert loss.figure.steps == (1, 2, 3, 4, 5, 6)
    assert loss.figure.series[0].values[3:] == (1.25, None, None)
    assert loss.figure.series[1].values[4] == 1.0
    assert loss.summary == "4 steps are in both; they differ by 0 at most."
