"""Records are drawn in a notebook by views that the page registers, when they are asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import echelon as ec
from echelon.config.load import load_job
from echelon.core.notebook import NotebookViews
from echelon.page.documents.plan import plan_page
from echelon.page.drawn.document import static_html

SOURCE = Path(ec.__file__).parent


def test_a_view_is_loaded_at_the_first_question_and_once() -> None:
    views, loaded = NotebookViews(), list[str]()

    def load() -> None:
        loaded.append("page")
        views.register("plan")(lambda record: f"<p>{record}</p>")

    views.load_from(load)
    assert loaded == []
    assert [views.html("plan", 1), views.html("plan", 2)] == ["<p>1</p>", "<p>2</p>"]
    assert loaded == ["page"]


def test_a_record_that_nothing_draws_is_shown_as_its_text() -> None:
    assert NotebookViews().html("plan", object()) is None


def test_a_plan_in_a_notebook_is_its_page() -> None:
    plan = load_job("nano").plan
    assert ec.Plan._repr_html_(plan) == static_html(plan_page(plan))


def test_every_record_with_a_view_has_one_on_the_page() -> None:
    asked, registered = set[str](), set[str]()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        asked |= set(re.findall(r'NOTEBOOK_VIEWS\.html\("(\w+)"', text))
        registered |= set(re.findall(r'NOTEBOOK_VIEWS\.register\("(\w+)"\)', text))
    views = {"plan", "answer", "sizes", "proof", "rehearsal", "comparison", "summary"}
    assert asked == registered == views


def test_a_notebook_needs_no_import_but_echelon() -> None:
    code = """
import sys
import echelon as ec
plan = ec.Plan.from_json(sys.stdin.read())
assert not any(name.startswith("echelon.page") for name in sys.modules)
assert plan._repr_html_().startswith("<")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=load_job("nano").plan.to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
