"""The pictures of a plan: text of 80 columns, or three figures in a folder that is new."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli.plan.view import PLANNED, draw, painted, plan_figures, require_new_folder
from echelon.core.errors import ConfigError
from echelon.planner.view.lines import Span
from tests.parallel.layouts import plan_of
from tests.planner.view.figures import assert_narrow, assert_texts_are_clear

PLAN = plan_of(pp=2, tp=2)
SECONDS = {"matmul": 0.6, "tensor": 0.3, "bubble": 0.1}
HELD = {"parameters": 2.0**30, "activations": 3 * 2.0**30, "slack": 2.0**30, "context": 2.0**31}


def test_without_a_folder_all_three_pictures_are_text() -> None:
    text = draw(PLAN, SECONDS, HELD)
    assert_narrow(text)
    assert "\x1b" not in text
    assert re.search(rf"^{PLANNED} .* 7\.00 GiB +43\.8 %$", text, re.MULTILINE)
    assert re.search(r"^total +1\.0000 s +100\.0 %$", text, re.MULTILINE)
    assert "pp 2 x tp 2 = 4 ranks" in text


def test_with_a_folder_they_are_three_new_files(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    text = draw(PLAN, SECONDS, HELD, folder)
    names = ["memory.svg", "step.svg", "mesh.svg"]
    assert text == "".join(f"written: {folder / name}\n" for name in names)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names:
        figure = (folder / name).read_text(encoding="utf-8")
        assert_texts_are_clear(figure)
        assert PLAN.name in figure


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (tmp_path / "figures-2").write_text("kept", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        draw(PLAN, SECONDS, HELD, folder)
    assert caught.value.rules == ("never-overwrite",)
    assert caught.value.problems[0].suggestions == (f"--figures {tmp_path / 'figures-3'}",)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        require_new_folder(tmp_path / "missing" / "figures")
    assert caught.value.rules == ("cannot-write",)
    assert list(tmp_path.iterdir()) == []


def test_ranks_get_the_slack_and_context_of_what_is_planned() -> None:
    planned, *ranks = plan_figures(PLAN, SECONDS, HELD).memory.rows
    assert planned.total == sum(HELD.values())
    for row in ranks:
        own = row.total - row.terms["slack"] - row.terms["context"]
        assert row.terms["context"] == HELD["context"]
        assert row.terms["slack"] == pytest.approx(own / 4)
    assert all("slack" not in row.terms for row in plan_figures(PLAN, SECONDS, {}).memory.rows)


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
