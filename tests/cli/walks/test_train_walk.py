"""A walk of runs: each command must end with 0, and the run goes on under another layout."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from echelon.config.load import load_job
from tests.cli.walks import train_walk
from tests.cli.walks.commands import CommandEnd, Commands, commands_in
from tests.cli.walks.train_walk import other_layout, shortened, summary, train_random
from tests.walks.plans.random_settings import PRESET, Settings, flags_of

NO_NAMES = json.dumps({"problems": [{"rule": "weights-have-architecture"}]})
REFUSED = json.dumps({"problems": [{"rule": "tp-divides-heads"}]})
SMALL: Settings = {
    "mesh.tp": 2,
    "mesh.dp_replicate": 2,
    "model.layers": 4,
    "batch.global_sequences": 8,
    "batch.microbatch_sequences": 2,
    "optimizer.schedule": "wsd",
    "optimizer.warmup_steps": 20,
    "optimizer.decay_steps": 60,
}
SERVED: Settings = {
    "mesh.dp_replicate": 2,
    "servers.count": 1,
    "servers.updates": "asynchronous",
    "model.layers": 4,
}


class Told:
    """Commands that end with 0, except for the named ones; without processes."""

    def __init__(self, **ends: tuple[int, str]) -> None:
        self._ends = ends
        self.words: list[tuple[str, ...]] = []

    def run(self, *words: str) -> CommandEnd:
        self.words.append(words)
        name = "resume" if "--resume" in words else words[0]
        name = words[words.index("--to") + 1] if "--to" in words else name
        code, output = self._ends.get(name, (0, ""))
        return CommandEnd(words=words, code=code, output=output, errors="", seconds=1.0)


def walked(
    patch: pytest.MonkeyPatch, folder: Path, settings: Settings, **ends: tuple[int, str]
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return the line of a draw of these settings, and the words of its commands."""
    patch.setattr(train_walk, "draw", lambda seed, number, offload: settings)
    commands = Told(**ends)
    line = train_random(5, 0, cast(Commands, commands), folder / "text", folder / "run")
    return line, commands.words


def test_what_works_and_what_failed_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    works, words = walked(monkeypatch, tmp_path, SMALL)
    assert (works["outcome"], works["export"]) == ("works", "hf")
    names = ["plan", "train", "generate", "generate", "export", "train"]
    assert [command[0] for command in words] == names
    assert "mesh.tp=2" in words[3]
    failed, _ = walked(monkeypatch, tmp_path / "a", SMALL, resume=(2, "error[tp-divides-heads]"))
    assert failed["outcome"] == "failed"
    assert "resume ends with 2" in failed["problems"][0]
    refused, _ = walked(monkeypatch, tmp_path / "b", SMALL, plan=(2, REFUSED))
    assert (refused["outcome"], refused["rules"]) == ("refused", ("tp-divides-heads",))
    large, words = walked(monkeypatch, tmp_path / "c", {"cluster.preset": "8xh200"})
    assert (large["outcome"], words) == ("refused", [])
    figures = summary([works, failed, refused, large]).splitlines()
    assert "2 runs, 0 of them mixtures" in figures[0]
    assert "all commands of 1 work, 1 failed; 2 draws" in figures[0]


def test_a_model_without_an_architecture_is_exported_in_names_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line, _ = walked(monkeypatch, tmp_path, SMALL, export=(2, NO_NAMES))
    assert (line["outcome"], line["export"]) == ("works", "echelon")
    none = {"export": (2, NO_NAMES), "echelon": (2, NO_NAMES)}
    line, _ = walked(monkeypatch, tmp_path / "a", SMALL, **none)
    assert line["outcome"] == "failed"
    assert "export ends with 2" in line["problems"][0]
    line, _ = walked(monkeypatch, tmp_path / "b", SMALL, export=(2, REFUSED))
    assert line["outcome"] == "failed"


@pytest.mark.parametrize("settings", [SMALL, SERVED], ids=["split", "servers"])
def test_a_run_goes_on_with_the_same_mathematics(settings: Settings) -> None:
    short = shortened(settings)
    plan = load_job(PRESET, flags_of(short)).plan
    assert plan.mathematics.optimizer.total_steps == 2
    other = other_layout(Random("5"), short, "/nowhere")
    if "servers.count" in settings:
        assert other is not None
        assert other["servers.count"] == 2
    assert other is not None
    resumed = load_job(PRESET, flags_of(other)).plan
    assert resumed.same_mathematics(plan)
    assert resumed.layout != plan.layout


@pytest.mark.slow
def test_a_run_is_trained_and_used_by_commands(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        text = train_walk.small_text(tmp_path)
        line = train_random(11, 0, commands, text, tmp_path / "run")
    assert line["outcome"] == "works", line["problems"]
