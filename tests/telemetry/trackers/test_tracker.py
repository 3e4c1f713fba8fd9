"""What a tracker is told of a run: its settings and what follows from its plan."""

from __future__ import annotations

from pathlib import Path

from echelon.telemetry.trackers.tracker import TrackedRun, config_of
from tests.telemetry.trackers.metrics import make_run


def test_settings_have_the_names_of_the_run_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = config_of(run.path)
    assert config["extends"] == "nano"
    assert config["mesh.pp"] == 1
    assert config["plan_hash"] == run.plan().content_hash()
    assert config["world_size"] == 1
    assert config["tokens_per_step"] == run.plan().tokens_per_step


def test_a_run_that_took_steps_again_has_a_name_of_its_own() -> None:
    def named(revision: int) -> str:
        folder = Path("here")
        run = TrackedRun(
            folder=folder, project="p", group="nano", revision=revision, id="", config={}
        )
        return run.name

    assert [named(1), named(2)] == ["nano", "nano-2"]
