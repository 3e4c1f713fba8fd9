"""The walk over presets names all of them, and a few hold here; `make walk-rehearsals` does all."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.presets import preset_names
from tests.walks.rehearsals.preset_walk import PUBLISHED, main, names, plan_of, rehearse_preset


def test_all_presets_are_walked_and_those_of_published_runs_come_last() -> None:
    assert sorted(names()) == sorted({*preset_names("runs"), *preset_names("models")})
    assert set(names()[-len(PUBLISHED) :]) == set(PUBLISHED)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["nano-zero3", "toy-experts", "gpt2"])
def test_presets_hold(name: str) -> None:
    found = rehearse_preset(name, "", workers=1)
    assert not found.problems
    assert found.rehearsed == len(found.memory_errors) >= 1
    assert "holds" in found.line()


@pytest.mark.slow
def test_a_published_run_is_planned_where_it_ran() -> None:
    plan, cluster = plan_of("llama3-70b")
    assert (cluster, plan.mesh.world_size) == ("64xh100", 64)


def test_what_the_results_have_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["nano", "--results", str(tmp_path / "presets.jsonl")]
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()[1]
    assert first.startswith("nano ")
    monkeypatch.setattr("tests.walks.rehearsals.preset_walk.rehearse_preset", None)
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1] == first
