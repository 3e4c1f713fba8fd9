"""A run holds what it needs to go on: the user's own files may be changed or gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import echelon as ec
from echelon.api.training import TrainResult
from echelon.config.load import load_job
from echelon.core.plan import Plan
from tests.config.measured import times_file

TINY = (
    "data.source=words.txt",
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=4",
    "batch.microbatch_sequences=1",
    "optimizer.warmup_steps=2",
    "train.steps=2",
    "checkpoint.every=1",
    "mesh.pp=2",
)
Trained = tuple[TrainResult, Path, Path]
Ended = Callable[[Sequence[str]], TrainResult]
ROWS = (
    "F0.0,F0.1,BW0.0,F0.2,B0.1,F0.3,W0.1,BW0.2,BW0.3",
    "F1.0,BW1.0,F1.1,BW1.1,F1.2,BW1.2,F1.3,BW1.3",
)
CLUSTER = """
name = "mine"
devices_per_node = 4
backend = "gloo"
[device]
name = "CPU rank"
memory_bytes = 2000000000
memory_bandwidth = 1e10
[[links]]
name = "loopback"
bandwidth = 1e9
latency_s = 1e-4
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Trained]:
    """Return a function that gives what `ec.train` says, the folder where it ran, and a copy.

    There are a text, a schedule, times and a cluster. Tests of the same settings share the run.
    """
    done: dict[tuple[str, ...], Trained] = {}

    def train(settings: Sequence[str]) -> Trained:
        if tuple(settings) not in done:
            folder = tmp_path_factory.mktemp("trained")
            lines = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
            (folder / "words.txt").write_text("".join(lines))
            (folder / "mine.csv").write_text("\n".join(ROWS))
            (folder / "mine.toml").write_text(CLUSTER)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                times_file(load_job("nano", TINY).plan, folder / "times.json", head=3.0)
                said = ec.train("nano", settings=[*TINY, *settings])
            copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
            done[tuple(settings)] = said, folder, copy
        return done[tuple(settings)]

    return train


@pytest.fixture
def ended(trained: Callable[[Sequence[str]], Trained], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Return a function that works where a run has just ended: all is as it left it."""

    def work(settings: Sequence[str]) -> TrainResult:
        said, folder, copy = trained(settings)
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        monkeypatch.chdir(folder)
        return said

    return work


FILE = ["pipeline.schedule=file", "pipeline.file=mine.csv", "cluster.file=mine.toml"]
SPLITS = {
    "schedule and cluster are gone": (FILE, ["mine.csv", "mine.toml"], None),
    "schedule and cluster are changed": (FILE, ["mine.csv", "mine.toml"], "not what it was"),
    "the times of a search are gone": (
        ["pipeline.schedule=auto", "pipeline.times=times.json"],
        ["times.json"],
        None,
    ),
    "the times of balanced stages are gone": (["pipeline.times=times.json"], ["times.json"], None),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("settings", "files", "text"), SPLITS.values(), ids=list(SPLITS))
def test_a_run_goes_on_without_the_files_it_was_started_with(
    ended: Ended, settings: list[str], files: list[str], text: str | None
) -> None:
    first = ended(settings)
    assert first.run == Path("runs/nano")
    kept = Plan.read(first.run / "plan.json")
    for name in files:
        Path(name).unlink()
        if text is not None:
            Path(name).write_text(text)
    shutil.rmtree(first.run / "checkpoints/step-000002")
    again = ec.train(first.run / "run.toml", resume=first.run)
    assert again.run.resolve() == Path("runs/nano").resolve()
    assert [path.name for path in Path("runs").glob("nano*")] == ["nano"]
    assert again.summary.steps == 2
    assert again.summary.loss == first.summary.loss
    # The plan is the very same, and is read, not searched.
    now = load_job(first.run / "run.toml").plan
    assert now.layout.pipeline.rows == kept.layout.pipeline.rows
    assert now.layout.pipeline.stages == kept.layout.pipeline.stages
    assert now.cluster == kept.cluster


def test_the_folder_of_a_run_may_be_moved(ended: Ended) -> None:
    first = ended(FILE)
    plan = load_job(first.run / "run.toml").plan
    Path("mine.csv").unlink()
    moved = Path("elsewhere")
    first.run.rename(moved)
    assert load_job(moved / "run.toml").plan == plan


def test_another_split_makes_another_run(ended: Ended) -> None:
    first = ended(FILE)
    Path("mine.csv").write_text("\n".join(reversed(ROWS)))
    other = ec.train("nano", settings=[*TINY, *FILE], resume=first.run)
    assert other.run.name == "nano-2"
    assert (other.run / "schedule.csv").read_text() != (first.run / "schedule.csv").read_text()
