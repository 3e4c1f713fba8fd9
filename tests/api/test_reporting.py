"""`ec.report` writes the page, or the figures, of whatever has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import echelon as ec
from echelon.core.errors import ConfigError
from echelon.page.documents.plan import plan_page
from echelon.page.documents.run import run_page
from echelon.page.html import page_html
from tests.page.documents.test_run import steps, written

FIGURES = ["memory.svg", "step.svg"]


def test_a_plan_is_a_page_or_figures(tmp_path: Path) -> None:
    plan = ec.plan("nano")
    page = tmp_path / "plan.html"
    assert ec.report(plan, page) == (page,)
    assert page.read_text(encoding="utf-8") == page_html(plan_page(plan))
    folder = tmp_path / "figures"
    assert ec.report(plan, str(folder)) == tuple(folder / name for name in FIGURES)
    beside = ec.report(plan, tmp_path / "nano.svg")
    assert [path.name for path in beside] == [f"nano-{name}" for name in FIGURES]


@pytest.mark.slow
def test_a_run_a_comparison_and_an_answer_have_pages(tmp_path: Path) -> None:
    run = written(tmp_path, steps(3))
    (page,) = ec.report(run, tmp_path / "run.html")
    assert page.read_text(encoding="utf-8") == page_html(run_page(run))
    result = ec.TrainResult(run=run, data=run, summary=cast("Any", None))
    (again,) = ec.report(result, tmp_path / "again.html")
    assert again.read_bytes() == page.read_bytes()
    found = ec.compare(ec.plan("nano"), ec.plan("nano-zero3"))
    assert "part-seconds.svg" in [path.name for path in ec.report(found, tmp_path / "two")]
    answer = ec.plan("llama3-8b", cluster="8xh100")
    (best,) = ec.report(answer, tmp_path / "best.html")
    assert best.read_text(encoding="utf-8") == page_html(plan_page(answer.plan))


def test_nothing_is_written_over_and_what_has_no_page_is_refused(tmp_path: Path) -> None:
    plan = ec.plan("nano")
    for name in ("plan.html", "figures"):
        ec.report(plan, tmp_path / name)
        with pytest.raises(ConfigError) as caught:
            ec.report(plan, tmp_path / name)
        assert caught.value.rules == ("never-overwrite",)
    with pytest.raises(ConfigError) as caught:
        ec.report(tmp_path, tmp_path / "run.html")
    assert caught.value.rules == ("run-exists",)
    with pytest.raises(TypeError, match="is no plan"):
        ec.report(cast("Any", 3), tmp_path / "three.html")
