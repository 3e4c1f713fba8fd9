"""`echelon data` prepares text, shows what it prepared, and tells damage by its rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.training.data.corpus import prepared_data
from echelon.training.data.dataset import TokenDataset

BPE = ["--tokenizer", "bpe-260"]
TEXT = "a word and another word\n" * 50


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


def test_prepare_and_show_agree(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tokens"
    assert main(["data", "prepare", str(source), "--out", str(output), "--json"]) == 0
    prepared = json.loads(capsys.readouterr().out)
    assert prepared["command"] == "data prepare"
    assert prepared["text_bytes"] == len(TEXT)
    assert prepared["dataset"]["num_documents"] == 1
    assert main(["data", "show", str(output), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in prepared["dataset"]} == prepared["dataset"]


def test_text_names_the_next_command_beside_the_result(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tokens"
    limited = ["data", "prepare", str(source), "--out", str(output), "--max-bytes"]
    assert main([*limited, "0.1 kib"]) == 2
    error = capsys.readouterr().err
    assert "set by: --max-bytes '0.1 kib'      works here: --max-bytes '0.1 KiB'" in error
    assert main([*limited, "0.1 kB"]) == 0
    printed = capsys.readouterr()
    assert "read        1 file, 100 B of text" in printed.out
    assert printed.err.endswith(f"--set data.source={output}\n")


def test_the_next_command_works_with_the_tokenizer_that_was_trained(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tokens"
    assert main(["data", "prepare", str(source), "--out", str(output), *BPE]) == 0
    settings = capsys.readouterr().err.split(" --set ")[1:]
    job = load_job("nano", [text.strip() for text in settings])
    assert prepared_data(job.data.source, job.data.tokenizer, tmp_path / "runs") == output
    TokenDataset.open(output).check_vocabulary(job.plan.model.vocab)


def test_an_output_that_exists_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", str(source), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error[data-output-exists]")


def test_a_folder_without_an_index_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error[data-prepared]")


def test_prepare_needs_an_output(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(source)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[bad-argument]")
    assert "--out" in error


def test_chats_say_how_much_is_answers_and_what_a_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = Path(__file__).parents[2] / "examples" / "chats"
    chats, output = tmp_path / "chats.jsonl", tmp_path / "tokens"
    chats.write_text((examples / "chats.jsonl").read_text())
    told = ["data", "prepare", str(chats), "--format", "chat", "--out", str(output)]
    assert main([*told, "--tokenizer", str(examples / "tokenizer")]) == 0
    printed = capsys.readouterr()
    assert "of these tokens" in printed.out
    assert "--set data.train_on=answers --set batch.documents=separate" in printed.err
    chats.write_text(chats.read_text() + '{"messages": [{"role": "human", "content": "?"}]}\n')
    told[-1] = str(tmp_path / "other")
    assert main([*told, "--tokenizer", str(examples / "tokenizer")]) == 2
    error = capsys.readouterr().err
    assert "data-chat-record" in error
    assert f"{chats}:61" in error
    assert not (tmp_path / "other").exists()
