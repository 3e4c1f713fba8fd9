"""`echelon export weights`: what it says, its JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.training.small_runs import trained_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(trained_run(tmp_path_factory.mktemp("trained")).run)


def test_it_says_what_was_written(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", "weights", run, "--out", str(out), "--dtype", "fp32"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: llama, 20 tensors, fp32, ")
    assert "in 1 file\n" in said.out
    assert "tokenizer: bytes, 257 ids\n" in said.out
    assert f'from_pretrained("{out}")' in said.err
    flags = ["--out", str(tmp_path / "two"), "--file-bytes", "20000", "--json"]
    assert main(["export", "weights", run, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "export weights"
    assert set(found["files"]) < {path.name for path in (tmp_path / "two").iterdir()}


def test_the_refusal_of_an_architecture_says_a_way_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(trained_run(tmp_path, ["model.sinks=true"]).run), str(tmp_path / "out")
    assert main(["export", "weights", run, "--out", out]) == 2
    assert "--to echelon" in capsys.readouterr().err
    assert main(["export", "weights", run, "--out", out, "--to", "echelon"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: echelon, ")
    assert f"--set train.weights={out} --set model.hf_config={out}" in said.err
    assert main(["plan", f"{out}/config.json", "--cluster", "8xh100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "plan"


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--model-type", "bert"], "weights-type-names-shape"),
        (["--model-type", "qwen3"], "weights-have-architecture"),
        (["--file-bytes", "0"], "bad-argument"),
        (["--to", "echelon", "--adapters"], "bad-argument"),
        (["--to", "echelon", "--model-type", "llama"], "bad-argument"),
    ],
)
def test_what_cannot_be_is_refused(
    run: str, flags: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "weights", run, "--out", str(tmp_path / "out"), *flags]) == 2
    assert f"error[{rule}]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
