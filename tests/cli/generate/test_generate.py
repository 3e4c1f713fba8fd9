"""`echelon generate`: its text and JSON, prompts from anywhere, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import echelon as ec
from echelon.cli.main import main
from tests.training.small_runs import trained_run

GREEDY = ["--max-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(trained_run(tmp_path_factory.mktemp("trained")).run)


def test_the_prompt_comes_with_what_was_written(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ec.generate(run, "line 1", max_tokens=6, temperature=0)
    assert main(["generate", run, "--prompt", "line 1", *GREEDY]) == 0
    said = capsys.readouterr()
    assert said.out == expected.text + "\n"
    size = "1 block x 16 positions x 2 layers x 2 x 2 x 8 numbers x 4 bytes"
    assert f"cache: 4.00 KiB a rank = {size}" in said.err
    assert "6 tokens in" in said.err


def test_prompts_come_from_files_and_from_standard_input(
    run: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("of words")
    monkeypatch.setattr("sys.stdin", io.StringIO("more"))
    flags = ["--prompt", "line", "--prompt-file", str(tmp_path / "prompt.txt")]
    assert main(["generate", run, *flags, "--prompt-file", "-", *GREEDY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "generate"
    assert [one["prompt"] for one in found["texts"]] == ["line", "of words", "more"]
    assert all(len(one["tokens"]) == 6 for one in found["texts"])
    assert found["cache_bytes"] == [3 * 16 * 2 * 2 * 2 * 8 * 4]


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ([], "generate-has-prompt"),
        (["--prompt-file", "nowhere.txt"], "bad-argument"),
        (["--prompt", "line", "--temperature", "0", "--top-k", "3"], "generate-sampling"),
        (["--prompt", "line", "--set", "mesh.cp=2"], "generate-settings"),
        (["--prompt", "line", "--set", "mesh.dp_replicate=2"], "generate-shares-prompts"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: str, flags: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", run, *flags]) == 2
    assert f"error[{rule}]" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_torchrun_write_one_text(run: str) -> None:
    expected = ec.generate(run, "line 1", max_tokens=6, temperature=0)
    arguments = ["--nproc-per-node", "2", "-m", "echelon", "generate", run, "--prompt", "line 1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(*arguments, *GREEDY, "--set", "mesh.tp=2", "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # Only the first rank says it.
    (text,) = json.loads(done.stdout)["texts"]
    assert tuple(text["tokens"]) == expected.tokens[0]
