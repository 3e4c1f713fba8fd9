"""A mixture from a run file to the tokens of a step: trained, resumed under another mesh, shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.telemetry.json_lines import read_entries

RUN = """
extends = "nano"
[model]
layers = 1
hidden = 32
ffn = 48
[batch]
sequence_length = 16
global_sequences = 4
microbatch_sequences = 1
[optimizer]
warmup_steps = 0
[train]
steps = 6
[checkpoint]
every = 3
keep = "all"
[[data.mixture]]
path = "prose"
weight = 3
until_step = 4
[[data.mixture]]
path = "code"
weight = 1
until_step = 4
[[data.mixture]]
path = "code"
weight = 1
"""


def _write(folder: Path) -> None:
    for name, line in (("prose", "one word and another"), ("code", "x = f(y)")):
        (folder / name).mkdir()
        for number in range(3):
            (folder / name / f"{number}.txt").write_text(f"{line} {number}\n" * 300)
    (folder / "run.toml").write_text(RUN)


def _losses(run: Path) -> dict[int, float | None]:
    entries = [one for one in read_entries(run / "metrics.jsonl") if one.text("kind") == "step"]
    return {one.whole("step"): one.number("loss") for one in entries}


@pytest.mark.slow
def test_a_mixture_is_trained_and_shown_and_resumed_under_another_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path)
    assert main(["train", "run.toml"]) == 0
    said = capsys.readouterr().err
    assert "/prose: 12 sequences" in said
    assert "/code: 12 sequences" in said

    for step, shares in ((1, [3, 1]), (4, [3, 1]), (5, [0, 4])):
        asked = ["data", "look", "runs/run", "--step", str(step), "--sample", "2", "--json"]
        assert main(asked) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sample"]["sources_of_step"] == shares
        words = "f(y)" if found["sample"]["source"].endswith("code") else "word"
        assert words in found["sample"]["text"]
        assert [one["share"] for one in found["sources"]] == [0.5, 0.5]
    assert main(["data", "look", "runs/run"]) == 0
    text = capsys.readouterr().out
    assert "documents   3, the longest of" in text
    assert "50.00 % of the sequences of the run" in text
    (mixture,) = (tmp_path / "runs" / "data").glob("mixture-*")
    assert main(["data", "look", str(mixture)]) == 0
    assert "ids occur" in capsys.readouterr().out
    assert main(["data", "look", str(mixture), "--step", "1"]) == 2
    assert "error[sample-of-step]" in capsys.readouterr().err

    again = ["train", "run.toml", "--resume", "runs/run/checkpoints/step-000003"]
    split = ["--set", "mesh.dp_replicate=2", "--set", "train.run_name=split"]
    assert main([*again, *split]) == 0
    whole, resumed = _losses(tmp_path / "runs/run"), _losses(tmp_path / "runs/split")
    assert list(resumed) == [4, 5, 6]
    for step, loss in resumed.items():
        assert loss == pytest.approx(whole[step], rel=1e-5)

    changed = ["--set", 'data.mixture=[{ path = "prose", weight = 1 }]']
    capsys.readouterr()
    assert main([*again, *changed, "--set", "train.run_name=other"]) == 2
    assert "error[resume-same-data]" in capsys.readouterr().err


def test_sources_that_are_gone_empty_short_or_of_other_tokenizers_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path)
    (tmp_path / "empty").mkdir()

    def refused(parts: str, *more: str) -> str:
        words = ["train", "run.toml", "--set", f"data.mixture=[{parts}]"]
        assert main([*words, *(word for one in more for word in ("--set", one))]) == 2
        return capsys.readouterr().err

    error = refused('{ path = "gone", weight = 1 }, { path = "empty", weight = 1 }')
    assert "error[data-source-unreadable]" in error
    assert "error[data-empty]" in error
    (tmp_path / "short.txt").write_text("a few words, and no more of them than these, said once")
    words = (
        "batch.global_sequences=64",
        "data.validation_fraction=0",
        "train.validate_every=never",
    )
    error = refused('{ path = "short.txt", weight = 1 }', *words)
    assert "error[data-fills-batch]" in error
    error = refused(
        '{ path = "prose", weight = 1 }, { path = "code", weight = 1 }',
        'data.tokenizer="bpe-260"',
        "model.vocab=260",
    )
    assert "error[data-tokenizer-same]" in error
    assert not list((tmp_path / "runs").glob("*/plan.json"))
