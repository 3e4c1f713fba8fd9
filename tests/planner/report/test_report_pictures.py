"""The pictures of a plan for a terminal: text of 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.report.report import pictures_text
from echelon.planner.view.figure_text import Span, painted
from echelon.planner.view.plan_figures import PLANNED, plan_bars
from tests.parallel.layouts import plan_of
from tests.planner.view.figures import assert_narrow

PLAN = plan_of(pp=2, tp=2)
SECONDS = {"matmul": 0.6, "tensor": 0.3, "bubble": 0.1}
HELD = {"parameters": 2.0**30, "activations": 3 * 2.0**30, "slack": 2.0**30, "context": 2.0**31}


def test_all_three_pictures_are_text() -> None:
    estimate = replace(estimate_plan(PLAN), seconds=SECONDS, bytes=HELD)
    text = pictures_text(PLAN, estimate)
    assert_narrow(text)
    assert "\x1b" not in text
    assert re.search(rf"^{PLANNED} .* 7\.00 GiB +43\.8 %$", text, re.MULTILINE)
    assert re.search(r"^total +1\.0000 s +100\.0 %$", text, re.MULTILINE)
    assert "pp 2 x tp 2 = 4 ranks" in text


def test_ranks_get_the_slack_and_context_of_what_is_planned() -> None:
    bars = plan_bars(PLAN, HELD)
    planned, *ranks = bars.rows
    assert planned.total == sum(HELD.values())
    for row in ranks:
        terms = dict(zip(bars.kinds, row.values, strict=True))
        own = row.total - terms["slack"] - terms["context"]
        assert terms["context"] == HELD["context"]
        assert terms["slack"] == pytest.approx(own / 4)
    assert "slack" not in plan_bars(PLAN, {}).kinds


def test_colors_are_for_terminals_that_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ((Span("PP", "#ff0000"), Span("  [bold]")),)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert painted(line) == "PP  [bold]\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert painted(line) == "\x1b[38;5;196mPP\x1b[0m  [bold]\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(line) == "PP  [bold]\n"
