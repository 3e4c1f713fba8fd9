"""The demo plans, proves and trains; it says where a model did not learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.cli import demo
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.optional import install_command
from tests.docs.readme import README

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with a text to train on."""
    (tmp_path / "words.txt").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(*settings: str) -> list[str]:
    return [
        word for text in ("data.source=words.txt", *TINY, *settings) for word in ("--set", text)
    ]


def test_the_demo_plans_proves_trains_and_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = flags("mesh.pp=1", "mesh.tp=1", "mesh.sequence_parallel=false")
    settings[settings.index("train.steps=8")] = "train.steps=60"
    settings[settings.index("train.validate_every=4")] = "train.validate_every=20"
    assert main(["demo", *settings]) == 0
    output = capsys.readouterr().out
    parts = ["1. The plan", "2. The proof", "\nproven\n", "3. The run", "4. What it writes"]
    places = [output.index(part) for part in [*parts, demo.PROMPT, "5. What to try next"]]
    assert places == sorted(places)
    assert (folder / "runs/nano/proof.json").is_file()


@pytest.mark.slow
def test_a_demo_that_does_not_learn_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = flags("mesh.pp=1", "mesh.tp=1", "mesh.sequence_parallel=false")
    settings[settings.index("train.steps=8")] = "train.steps=4"
    assert main(["demo", *settings]) == 1
    assert "it has not learned enough" in capsys.readouterr().err


def test_a_demo_without_torch_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from echelon.cli.main import main; "
    code += "sys.exit(main(['demo']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error[package-installed]: the demo needs the package torch")
    assert install_command("train") in done.stderr


@pytest.mark.parametrize(("memory", "ranks"), [(2**34, 8), (2**31, 4)])
def test_the_demo_takes_fewer_ranks_where_memory_is_small(
    memory: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.cli.demo.available_memory_bytes", lambda: memory)
    assert load_job("nano", demo.demo_settings(())).plan.mesh.world_size == ranks


def test_the_example_is_the_run_of_the_demo() -> None:
    example = load_job(README.parent / "examples/nano.toml")
    ours = load_job("nano", [*demo.LARGE, *demo.QUIET])
    assert example.plan == ours.plan
    assert example.data == ours.data
