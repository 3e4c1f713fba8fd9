"""Files of a run that were damaged, forged or moved are the user's to mend, not bugs of ours."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main

TINY = (
    "data.source=words.txt",
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=8",
    "batch.microbatch_sequences=1",
    "optimizer.warmup_steps=1",
    "train.steps=2",
    "checkpoint.every=1",
)
FLAGS = [word for text in TINY for word in ("--set", text)]
DEEP = "[" * 200_000


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a run has ended, to be copied."""
    folder = tmp_path_factory.mktemp("kept")
    lines = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (folder / "words.txt").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "nano", *FLAGS]) == 0
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run that has just ended, the folder it was made in being the working folder."""
    folder = shutil.copytree(kept, tmp_path / "copy")
    monkeypatch.chdir(folder)
    return Path("runs/nano")


def resume(run: Path, *settings: str) -> int:
    words = [word for text in settings for word in ("--set", text)]
    return main(["train", str(run / "run.toml"), "--resume", str(run), *words])


def forge_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json, and everything that is said of it in index.json."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    text = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(text)
    index = json.loads((checkpoint / "index.json").read_text())
    digest = hashlib.sha256(text).hexdigest()
    index["files"]["state.json"] = {"size_bytes": len(text), "sha256": digest}
    del index["checksum"]
    canonical = json.dumps(index, sort_keys=True, separators=(",", ":"))
    index["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    (checkpoint / "index.json").write_text(json.dumps(index))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("text", [DEEP, "{}", "[]", "null"])
@pytest.mark.parametrize("command", ["observe", "prove", "train"])
def test_a_plan_that_is_none(
    command: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "plan.json").write_text(text)
    code = resume(run) if command == "train" else main([command, str(run)])
    assert code == 2
    assert capsys.readouterr().err.rpartition("error[")[2].startswith("run-exists]: ")


@pytest.mark.parametrize("text", [DEEP, "{}", "[]"])
def test_an_index_that_is_none(text: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step-000002/index.json").write_text(text)
    assert resume(run) == 2
    assert "error[checkpoint-undamaged]: " in capsys.readouterr().err


@pytest.mark.parametrize("text", [DEEP, "[]", "7"])
def test_a_state_that_is_none(text: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = run / "checkpoints/step-000002/state.json"
    size = state.stat().st_size
    # As long as it was, so that nothing but what it says is wrong.
    state.write_text(text[:size].ljust(size))
    assert resume(run) == 2
    error = capsys.readouterr().err
    assert "error[checkpoint-undamaged]: " in error
    assert "state.json cannot be used" in error


@pytest.mark.parametrize("entry", ["engine", "num_updates", "loss_scale"])
def test_a_state_without_an_entry(
    entry: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(state: dict[str, Any]) -> None:
        (state if entry in state else state["engine"]).pop(entry)

    forge_state(run / "checkpoints/step-000002", change)
    assert resume(run) in (2, 4)
    error = capsys.readouterr().err
    assert "error[checkpoint-undamaged]: " in error
    assert "bug in Echelon" not in error


def test_a_checkpoint_that_was_moved_and_linked_back_is_pruned_as_a_link(run: Path) -> None:
    moved = run.parent / "moved"
    (run / "checkpoints/step-000001").rename(moved)
    (run / "checkpoints/step-000001").symlink_to(moved.resolve())
    shutil.rmtree(run / "checkpoints/step-000002")
    assert resume(run, "checkpoint.keep=1") == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert (moved / "index.json").is_file()


def test_a_checkpoint_beyond_the_last_step_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run, "train.steps=1") == 2
    error = capsys.readouterr().err
    assert (
        "error[resume-within-steps]: runs/nano/checkpoints/step-000002 has taken 2 steps" in error
    )
    assert "train.steps = 1 (2 > 1)" in error
    assert "set by: --set train.steps=1" in error
    assert "works here: train.steps = 4" in error
    assert [path.name for path in Path("runs").glob("nano*")] == ["nano"]


def test_a_run_that_has_taken_all_its_steps_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run) == 0
    output = capsys.readouterr()
    assert "from step 2 of 2: no step is left to take" in output.err
    assert "2 of 2" in output.out
    # It was validated once, which is no change of 100 %.
    assert re.search(r"^validation  \d\.\d{4}$", output.out, re.MULTILINE)


def test_data_with_fewer_samples_than_a_batch_starts_no_rank(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("few.txt").write_text("x" * 40)
    few = ["data.source=few.txt", "data.validation_fraction=0", "train.validate_every=never"]
    settings = [text for text in TINY if not text.startswith(("data.source", "batch.global"))]
    words = [word for text in (*settings, *few) for word in ("--set", text)]
    assert main(["train", "nano", *words, "--set", "batch.global_sequences=8"]) == 2
    error = capsys.readouterr().err
    assert "error[data-fills-batch]: batch.global_sequences = 8, and the 41 tokens" in error
    assert "are 3 samples of 16 tokens (3 < 8)" in error
    assert "set by: --set batch.global_sequences=8" in error
    assert "works here: batch.global_sequences = 3 or batch.sequence_length = 5 or less" in error
    assert not run.with_name("nano-2").exists()
    fewer = ["--set", "batch.global_sequences=3", "--set", "train.run_name=few"]
    assert main(["train", "nano", *words, *fewer]) == 0
    said = "2 steps of 3 sequences read the 3 training samples 2.0 times\n"
    assert said in capsys.readouterr().err
