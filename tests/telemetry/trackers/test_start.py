"""What a run does of its trackers: nothing but to start a process before, and end it after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.core.choices.trackers import TRACKERS
from echelon.core.errors import EnvironmentProblem
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.trackers import start
from echelon.telemetry.trackers.start import mirrored_run, require_trackers
from echelon.telemetry.trackers.tracker import tracker_folder
from tests.telemetry.runs import make_job
from tests.telemetry.trackers.fakes import HANGS, install_fakes
from tests.telemetry.trackers.metrics import FIRST, add_lines, make_run
from tests.telemetry.trackers.readers import read_tensorboard

SETTINGS = (
    *("model.layers=1", "model.hidden=32", "model.ffn=48", "batch.sequence_length=16"),
    *("batch.global_sequences=4", "batch.microbatch_sequences=2", "optimizer.warmup_steps=2"),
    *("mesh.dp_replicate=2", "train.steps=6", "train.validate_every=3", "data.source=words.txt"),
)


def test_a_package_that_is_missing_is_refused_before_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echelon.core.optional.find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem) as found:
        require_trackers(TRACKERS)
    assert found.value.rules == ("package-installed",) * 4
    assert "[wandb]'" in str(found.value)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nano", "--set", 'observe.trackers=["mlflow"]']) == 3
    assert "[mlflow]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_process_that_trains_imports_nothing_and_has_no_thread_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    fakes = install_fakes(tmp_path / "fakes")
    monkeypatch.setenv("PYTHONPATH", f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    job = make_job()
    observe = replace(job.observe, trackers=("mlflow",), tracker_drain_s=0.5)
    threads, modules, said = threading.active_count(), set(sys.modules), list[str]()
    with mirrored_run(replace(job, observe=observe), run, said.append):
        assert threading.active_count() == threads
        assert not {one.package for one in TRACKERS.values()} & (set(sys.modules) - modules)
    assert len(said) == 1
    assert f"echelon observe {run} --mirror mlflow" in said[0]


def test_a_process_that_cannot_be_started_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(start, "Companion", refuse)
    job, said, done = make_job(), list[str](), list[bool]()
    observe = replace(job.observe, trackers=("mlflow",))
    with mirrored_run(replace(job, observe=observe), tmp_path, said.append):
        done.append(True)
    assert done == [True]
    assert said == ["no trackers: their process cannot be started: Cannot allocate memory"]


@pytest.mark.slow
def test_a_run_is_the_same_with_trackers_that_hang_crash_fail_and_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("some words that are said again and again\n" * 400)
    fakes = install_fakes(tmp_path / "fakes")
    found: list[list[object]] = []
    all_of_them = f"observe.trackers={json.dumps(list(TRACKERS))}"
    for name, more in (
        ("plain", ()),
        ("mirrored", (all_of_them, "observe.tracker_drain_s=2")),
    ):
        if more:
            path = f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            monkeypatch.setenv("PYTHONPATH", path)
        settings = [word for one in (*SETTINGS, *more) for word in ("--set", one)]
        assert main(["train", "nano", *settings, "--set", f"train.run_name={name}"]) == 0
        lines = list(read_entries(tmp_path / "runs" / name / "metrics.jsonl"))
        told = ("kind", "step", "loss", "grad_norm", "learning_rate", "tokens")
        found.append([{key: one.values.get(key) for key in told} for one in lines])
    assert found[0] == found[1]
    assert len(found[0]) == 1 + 6 + 3 + 1
    assert capsys.readouterr().err.count("--mirror") == len(TRACKERS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_torchrun_rank_0_alone_mirrors_and_what_hangs_or_fails_ends_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "words.txt").write_text("some words that are said again and again\n" * 400)
    fakes = install_fakes(tmp_path / "fakes")
    shutil.rmtree(fakes / "tensorboard")  # The real one, beside wandb that hangs and mlflow.
    (fakes / "wandb" / "__init__.py").write_text(HANGS)
    trackers = ("tensorboard", "wandb", "mlflow")
    settings = (*SETTINGS, f"observe.trackers={json.dumps(trackers)}", "observe.tracker_drain_s=20")
    flags = [word for one in (*settings, "train.run_name=joined") for word in ("--set", one)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "echelon", "train", "nano", *flags),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "joined"
    lines = list(read_entries(run / "metrics.jsonl"))
    losses = {one.values["step"]: one.number("loss") for one in lines if one.text("kind") == "step"}
    assert sorted(losses) == list(range(1, 7))
    values, _ = read_tensorboard(run)
    (told,) = [found for name, found in values.items() if name.endswith("loss") and len(found) == 6]
    assert told == pytest.approx(losses)
    files = list(tracker_folder(run, "tensorboard").rglob("events.out.tfevents.*"))
    assert len(files) == 1, "one rank mirrors"
    assert done.stderr.count("--mirror wandb") == done.stderr.count("--mirror mlflow") == 1
    assert "--mirror tensorboard" not in done.stderr
