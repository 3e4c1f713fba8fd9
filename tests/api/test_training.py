"""What training takes: a plan is a job of as many steps as its schedule has; what a run writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import echelon as ec
from echelon.api.training import TrainResult, job_of_plan, launched_world_size
from echelon.core.errors import ConfigError
from echelon.training.data.prepare import prepare
from echelon.training.loop import TrainSummary
from tests.telemetry.recorded_runs import plan_of, write_run


def test_a_plan_trains_for_the_steps_of_its_schedule() -> None:
    plan = ec.plan("nano", settings=["train.steps=401", "optimizer.warmup_steps=0"])
    job = job_of_plan(plan, "/some/text")
    assert (job.plan, job.train.steps, job.train.run_name) == (plan, 401, plan.name)
    # 200 lines at most.
    assert job.observe.log_every == 5
    assert job.data.source == "/some/text"


def test_a_plan_is_resolved_and_takes_no_settings() -> None:
    with pytest.raises(TypeError, match="settings belong to"):
        ec.train(ec.plan("nano"), settings=["mesh.tp=2"])


def test_ranks_are_those_of_a_launcher_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert launched_world_size() is None
    for name, value in zip(names, ("3", "4", "3", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched_world_size() == 4


def test_a_folder_that_is_no_run_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.generate(tmp_path, "def ")
    assert caught.value.rules == ("run-exists",)


def test_what_a_run_writes_follows_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def continued(decoder: object, ids: object, count: int, **rest: object) -> list[int]:
        asked.update(rest, decoder=decoder, ids=ids, count=count)
        return [ord(letter) for letter in "abc"][:count]

    (tmp_path / "text.txt").write_text("x" * 100)
    data = tmp_path / "data"
    prepare([tmp_path / "text.txt"], data)
    run = write_run(tmp_path / "run", plan_of(), [])
    monkeypatch.setattr("echelon.training.generate.load_decoder", lambda *_: "decoder")
    monkeypatch.setattr("echelon.training.generate.continue_tokens", continued)
    stored = SimpleNamespace(path=tmp_path)
    monkeypatch.setattr("echelon.training.checkpoint.folder.find_latest", lambda _: stored)
    summary = cast(TrainSummary, None)
    result = TrainResult(run=run.path, data=data, summary=summary)
    assert ec.generate(result, "hi ", tokens=2, seed=7) == "hi ab"
    assert (asked["decoder"], list(asked["ids"]), asked["count"]) == ("decoder", [104, 105, 32], 2)
    assert (asked["seed"], asked["temperature"]) == (7, 0.6)
