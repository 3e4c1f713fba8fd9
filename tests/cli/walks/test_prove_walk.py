"""A walk of proofs: a draw is refused by `plan`, proven, or a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from echelon.core.version import source_hash
from tests.cli.walks import prove_walk
from tests.cli.walks.commands import CommandEnd, Commands, commands_in
from tests.cli.walks.prove_walk import MIXTURES, draw, main, prove_random, summary

REFUSED = json.dumps({"problems": [{"rule": "tp-divides-heads"}]})


class Told:
    """Commands with given exit codes, without processes."""

    def __init__(self, end: Callable[[str], tuple[int, str]]) -> None:
        self._end = end
        self.words: list[tuple[str, ...]] = []

    def run(self, *words: str) -> CommandEnd:
        self.words.append(words)
        code, output = self._end(words[0])
        return CommandEnd(words=words, code=code, output=output, errors="", seconds=1.0)


def walked(**ends: tuple[int, str]) -> dict[str, Any]:
    """Return the line of a draw whose commands end so."""
    return prove_random(5, 0, cast(Commands, Told(lambda name: ends[name])), "/nowhere")


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ({"plan": (2, REFUSED)}, "refused"),
        ({"plan": (0, "{}"), "prove": (0, "proven")}, "proven"),
        ({"plan": (1, "{}"), "prove": (0, "proven")}, "proven"),
        ({"plan": (0, "{}"), "prove": (1, "NOT PROVEN")}, "failed"),
        ({"plan": (0, "{}"), "prove": (2, "error[capacity-holds-tokens]")}, "failed"),
        ({"plan": (70, "Traceback")}, "failed"),
        ({"plan": (2, "no object")}, "failed"),
        ({"plan": (0, "{}"), "prove": (124, "")}, "failed"),
    ],
)
def test_a_refusal_by_a_later_command_is_a_failure(
    ends: dict[str, tuple[int, str]], outcome: str
) -> None:
    line = walked(**ends)
    assert line["outcome"] == outcome
    assert line["command"].startswith("echelon prove nano --set ")
    assert bool(line["problem"]) == (outcome == "failed")
    assert line["rules"] == (("tp-divides-heads",) if outcome == "refused" else ())


def test_a_third_of_the_draws_are_mixtures_with_a_capacity() -> None:
    assert draw(1, 7, "/a") == draw(1, 7, "/a") != draw(1, 8, "/a")
    drawn = [draw(3, number, "/a") for number in range(0, 10 * MIXTURES, MIXTURES)]
    assert all("experts.capacity_factor" in settings for settings in drawn)


@contextmanager
def refusing(folder: Path) -> Any:
    """Yield commands that refuse all."""
    yield Told(lambda name: (2, REFUSED))


def test_late_completion_is_asked_for_and_told() -> None:
    commands = Told(lambda name: (0, "{}"))
    line = prove_random(5, 0, cast(Commands, commands), "/nowhere", flags=["--late"])
    assert commands.words[-1][-1] == "--late"
    assert line["flags"] == ["--late"]
    assert line["command"].endswith(" --late")


def test_a_walk_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_walk, "commands_in", refusing)
    results = tmp_path / "lines"
    code = source_hash()[:16]
    line = {**walked(plan=(0, "{}"), prove=(1, "NOT PROVEN")), "number": 1, "code": code}
    results.write_text(json.dumps(line) + "\n")
    assert main(["--plans", "1", "--seed", "5", "--results", str(results)]) == 1
    text = capsys.readouterr().out
    assert "0 refused  tp-divides-heads" in text
    assert "1 failed   1.0 s" in text
    assert "1 plans, 1 of them mixtures with a capacity factor: 0 proven, 1 failed" in text
    assert len(results.read_text().splitlines()) == 2


def test_the_figures() -> None:
    lines = [walked(plan=(2, REFUSED)), walked(plan=(0, "{}"), prove=(0, "proven"))]
    first, second, third = summary(lines).splitlines()
    assert first.endswith("1 proven, 0 failed; `echelon plan` refused 1 more")
    assert second == "seconds of a proof: median 1.0, nine of ten within 1.0"
    assert third.split() == ["1", "tp-divides-heads"]


def test_commands_end_as_those_of_a_user(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        refused = commands.run("plan", "nano", "--set", "mesh.tp=3", "--json")
        assert (refused.code, refused.rules[:1]) == (2, ("tp-divides-heads",))
        assert refused.command == "echelon plan nano --set mesh.tp=3 --json"
        written = commands.run("init", "--out", "run.toml")
        assert written.code == 0, written.last_lines
        assert (tmp_path / "run.toml").is_file()
        assert commands.run("train", "nano", timeout_s=0.0).code == 124


@pytest.mark.slow
def test_a_mixture_with_a_capacity_is_proven_by_the_command(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        line = prove_random(11, 0, commands, str(tmp_path))
    assert line["mixture"]
    assert line["outcome"] == "proven", line["problem"]
