"""`echelon train` from the first process to the exit code."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

import echelon as ec
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.telemetry.summary import summarize_run
from echelon.training.checkpoint.index import read_index

TINY = (
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=8",
    "batch.microbatch_sequences=1",
    "optimizer.warmup_steps=2",
    "train.steps=8",
    "train.validate_every=4",
    "checkpoint.every=4",
)
WORDS = "".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400))


@dataclass(frozen=True, slots=True)
class Kept:
    """Hold a folder in which `echelon train` ran, a copy of it, and what was printed."""

    folder: Path
    copy: Path
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with a text to train on."""
    (tmp_path / "words.txt").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return a run that several tests look at or go on from."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "words.txt").write_text(WORDS)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        assert main(["train", "nano", *flags()]) == 0
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
    return Kept(folder, copy, out.getvalue(), err.getvalue())


@pytest.fixture
def trained(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where that run has just ended: the folder is as it left it."""
    shutil.rmtree(kept.folder)
    shutil.copytree(kept.copy, kept.folder)
    monkeypatch.chdir(kept.folder)
    return kept.folder


def flags(*settings: str) -> list[str]:
    return [
        word for text in ("data.source=words.txt", *TINY, *settings) for word in ("--set", text)
    ]


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_a_run_leaves_its_folder_and_a_result(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "nano", *flags("mesh.tp=2"), "--json"]) == 0
    result = result_of(capsys)
    assert (result["command"], result["run"], result["stopped"]) == ("train", "runs/nano", False)
    assert result["checkpoint"] == "runs/nano/checkpoints/step-000008"
    summary = summarize_run(folder / "runs/nano")
    assert (summary.steps, summary.checkpoints) == (8, (4, 8))
    assert summary.last_validation == result["last_validation"]
    logs = sorted(path.name for path in (folder / "runs/nano/logs").glob("*.log"))
    assert logs == ["rank-0000.log", "rank-0001.log"]
    # What is written down is enough to do it again.
    again = load_job(folder / "runs/nano/run.toml")
    assert again.plan.same_mathematics(Plan.read(folder / "runs/nano/plan.json"))


def test_text_says_how_it_ended(kept: Kept) -> None:
    lines = dict(line.split(maxsplit=1) for line in kept.out.splitlines())
    assert lines["run"] == "runs/nano"
    assert lines["steps"] == "8 of 8"
    assert re.fullmatch(r"\d\.\d{4} -> \d\.\d{4} \(\d+\.\d %\)", lines["validation"])
    assert "training nano in runs/nano" in kept.err


@pytest.mark.usefixtures("trained")
def test_a_run_goes_on_in_its_folder_and_another_split_in_a_new_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "nano", *flags("train.run_name=nano"), "--json"]) == 2
    assert "run-written-once" in capsys.readouterr().out
    assert main(["train", "nano", *flags(), "--resume", "runs/nano", "--json"]) == 0
    assert result_of(capsys)["run"] == "runs/nano"
    middle = "runs/nano/checkpoints/step-000004"
    assert main(["train", "nano", *flags("mesh.pp=2"), "--resume", middle, "--json"]) == 0
    other = result_of(capsys)
    assert (other["run"], other["steps"]) == ("runs/nano-2", 8)


@pytest.mark.usefixtures("trained")
def test_a_longer_or_renamed_run_goes_on_in_a_folder_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    again = ["train", "runs/nano/run.toml", "--resume", "runs/nano", "--json"]
    assert main([*again, "--set", "train.steps=10"]) == 0
    longer = result_of(capsys)
    assert (longer["run"], longer["steps"]) == ("runs/nano-2", 10)
    assert main([*again, "--set", "train.run_name=other"]) == 0
    assert result_of(capsys)["run"] == "runs/other"
    assert main([*again, "--set", "train.run_name=nano-2"]) == 2
    assert "run-written-once" in capsys.readouterr().out


def test_what_a_checkpoint_does_not_fit_is_said_before_any_rank_starts(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["--resume", "runs/nano"]
    (trained / "words.txt").write_text("other words\n" * 400)
    assert main(["train", "nano", *flags("mesh.tp=2"), *resume]) == 2
    assert "error[resume-same-data]" in capsys.readouterr().err
    (trained / "runs/nano/checkpoints/step-000008/rank-0000.safetensors").unlink()
    assert main(["train", "nano", *flags("mesh.tp=2"), *resume]) == 2
    assert "error[checkpoint-complete]" in capsys.readouterr().err
    assert main(["train", "nano", *flags(), "--resume", "runs"]) == 2
    assert "works here: runs/nano " in capsys.readouterr().err
    assert not (trained / "runs/nano-2").exists()


def test_a_cluster_of_gpus_on_a_machine_without_is_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["train", "nano", *flags("cluster.preset=8xh100", "mesh.tp=2")]) == 3
    error = capsys.readouterr().err
    assert error.count("error[") == 1
    assert error.startswith("error[enough-devices]: nccl gives each rank a GPU of its own")
    assert "set by: --set cluster.preset=8xh100" in error
    assert not (folder / "runs").exists()


def test_all_of_the_data_may_be_trained_on(folder: Path) -> None:
    settings = flags("data.validation_fraction=0")
    settings[settings.index("train.validate_every=4")] = "train.validate_every=never"
    assert main(["train", "nano", *settings]) == 0


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_what_a_launcher_sets_starts_nothing(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert main(["train", "nano", *flags()]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error[rank-environment]")
    assert f"set by: {name}=1" in error
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "resume", "rule"),
    [
        ((), "runs/absent", "checkpoint-exists"),
        (("data.source=absent.txt",), None, "data-source-unreadable"),
        (("model.vocab=64",), None, "data-token-range"),
        (("batch.sequence_length=900", "data.validation_fraction=0.01"), None, "data-too-short"),
    ],
)
def test_what_can_be_known_before_is_said_before_any_rank_starts(
    settings: tuple[str, ...],
    resume: str | None,
    rule: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [text.split("=")[0] for text in settings]
    kept = [text for text in ("data.source=words.txt", *TINY) if text.split("=")[0] not in keys]
    words = [word for text in (*kept, *settings) for word in ("--set", text)]
    words += [] if resume is None else ["--resume", resume]
    assert main(["train", "nano", *words]) == 2
    assert f"error[{rule}]" in capsys.readouterr().err
    assert not (folder / "runs" / "nano").exists()


def test_ctrl_c_stops_at_a_step_with_a_checkpoint(folder: Path) -> None:
    arguments = [sys.executable, "-m", "echelon", "train", "nano", *flags("mesh.pp=2")]
    arguments[arguments.index("train.steps=8")] = "train.steps=100000"
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        metrics = folder / "runs/nano/metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and '"step":2,' in metrics.read_text()):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 75
    assert errors.rstrip().endswith("go on: echelon train runs/nano/run.toml --resume runs/nano")
    summary = summarize_run(folder / "runs/nano")
    assert summary.checkpoints[-1] == summary.steps
    assert read_index(folder / f"runs/nano/checkpoints/step-{summary.steps:06d}").step > 0


@pytest.mark.slow
@pytest.mark.system("S51")
def test_ranks_of_torchrun_join_one_run(folder: Path) -> None:
    arguments = ["--nproc-per-node", "2", "-m", "echelon", "train", "nano"]
    arguments += [*flags("mesh.dp_replicate=2"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"] == "runs/nano"
    assert summarize_run(folder / "runs/nano").checkpoints == (4, 8)


@pytest.mark.slow
def test_a_run_folder_is_proven_and_gets_its_proof(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "nano", *flags("mesh.tp=2")]) == 0
    assert main(["prove", "runs/nano"]) == 0
    capsys.readouterr()
    proof = json.loads((folder / "runs/nano/proof.json").read_text())
    assert proof["proven"] is True


@pytest.mark.slow
def test_a_run_started_from_python_is_proven_by_its_plan(folder: Path) -> None:
    plan = ec.plan("nano", settings=[*TINY, "mesh.tp=2"])
    ec.train(plan, data="words.txt")
    assert main(["prove", "runs/nano"]) == 0
    assert (folder / "runs/nano/proof.json").is_file()
