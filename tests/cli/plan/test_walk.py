"""A search, and the page of the run file that it writes, say the same of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.cli.plan.walk import both, difference


@pytest.mark.slow
def test_random_plans_take_on_their_page_what_the_search_says() -> None:
    assert {
        f"{says['schedule']} {says['mesh']}": wrong
        for says, page in both(seed=2, count=8)
        if (wrong := difference(says, page))
    } == {}


@pytest.mark.slow
def test_fifty_random_plans_take_on_their_page_what_the_search_says() -> None:
    pairs = list(both(seed=1, count=50))
    assert {
        f"{says['schedule']} {says['mesh']}": wrong
        for says, page in pairs
        if (wrong := difference(says, page))
    } == {}
    assert len({says["schedule"] for says, _ in pairs}) >= 8
    assert any(says["mesh"]["pp"] == 1 for says, _ in pairs)
    assert any(says["mesh"]["ep"] > 1 for says, _ in pairs)


@pytest.mark.slow
def test_both_commands_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run.toml")
    pins = [word for pin in ("pp=4", "dp_shard=2", "schedule=1f1b") for word in ("--pin", pin)]
    search = ["plan", "llama3-8b", "--cluster", "8xh100", *pins, "--json", "--out", run]
    assert main(search) == 0
    says = json.loads(capsys.readouterr().out)["search"]["plans"][0]
    assert main(["plan", run, "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert says["stages"] == page["plan"]["layout"]["pipeline"]["stages"]
    assert (says["step_s"], says["seconds"]) == (
        page["estimate"]["step_s"],
        page["estimate"]["seconds"],
    )
    assert says["bytes"] == page["estimate"]["bytes"]
    assert main(["plan", run]) == 0
    assert f"step     {says['step_s']:.4g} s (" in capsys.readouterr().out
