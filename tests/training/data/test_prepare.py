"""Every format gives the same tokens; nothing half-written stays; nothing is written over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.prepare import PrepareOptions, describe, prepare
from echelon.training.data.tokenizer import ByteTokenizer

DOCUMENTS = ["one\r\ntwo\n", "\u00e9t\u00e9 \U0001f600", "three"]


def _tokens(path: Path) -> list[int]:
    dataset = TokenDataset.open(path, verify=True)
    return dataset.tokens(0, dataset.num_tokens).tolist()


def _expected(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), 256]]


def _folder(path: Path) -> Path:
    path.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (path / f"{number}.txt").write_bytes(text.encode())
    return path


def test_a_folder_of_texts(tmp_path: Path) -> None:
    summary = prepare([_folder(tmp_path / "texts")], tmp_path / "tokens")
    assert _tokens(tmp_path / "tokens") == _expected(DOCUMENTS)
    assert summary.num_files == summary.dataset.num_documents == 3
    assert summary.text_bytes == len("".join(DOCUMENTS).encode())
    assert summary.dataset.num_tokens == summary.text_bytes + 3
    assert summary.dataset == describe(tmp_path / "tokens")
    assert (summary.dataset.tokenizer, summary.dataset.dtype) == ("bytes", "uint16")
    assert [path.name for path in tmp_path.iterdir() if "preparing" in path.name] == []


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    source = _folder(tmp_path / "texts")
    options = PrepareOptions(shard_tokens=10)
    for name, tokenizer in (("a", "bytes"), ("b", "bytes"), ("c", "bpe-270"), ("d", "bpe-270")):
        prepare([source], tmp_path / name, tokenizer=tokenizer, options=options)
    for first, second in (("a", "b"), ("c", "d")):
        names = sorted(path.name for path in (tmp_path / first).iterdir())
        assert len(names) >= 4
        for name in names:
            assert (tmp_path / first / name).read_bytes() == (tmp_path / second / name).read_bytes()
    assert describe(tmp_path / "a").hash != describe(tmp_path / "c").hash


def test_tokens_do_not_depend_on_pieces_batches_or_shards(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text("".join(f"line {number} \u00e9\n" for number in range(5000)))
    for name in ("bytes", "bpe-300"):
        prepare([source], tmp_path / f"whole-{name}", tokenizer=name)
    pieces = replace(TRAINING_PIECES, text_bytes=1000, shard_tokens=777)
    prepare([source], tmp_path / "cut-bytes", pieces=pieces)
    assert _tokens(tmp_path / "cut-bytes") == _tokens(tmp_path / "whole-bytes")
    assert describe(tmp_path / "cut-bytes").num_documents == 1
    assert describe(tmp_path / "cut-bytes").num_shards > 10
    # Byte pairs: the cut after a newline may change a token, never the text.
    trained = str(tmp_path / "whole-bpe-300")
    prepare([source], tmp_path / "cut-bpe", tokenizer=trained, pieces=pieces)
    tokenizer = TokenDataset.open(tmp_path / "cut-bpe").tokenizer()
    assert tokenizer.decode(_tokens(tmp_path / "cut-bpe")) == source.read_text()


def test_a_limit_ends_the_text_at_a_character(tmp_path: Path) -> None:
    source = _folder(tmp_path / "texts")
    for limit, documents in (
        (5, ["one\r\n"]),
        (9, ["one\r\ntwo\n"]),
        (10, ["one\r\ntwo\n"]),
        (11, ["one\r\ntwo\n", "\u00e9"]),
        (1000, DOCUMENTS),
    ):
        output = tmp_path / f"tokens-{limit}"
        prepare([source], output, options=PrepareOptions(max_bytes=limit))
        assert _tokens(output) == _expected(documents)


def test_empty_files_among_others_are_counted(tmp_path: Path) -> None:
    source = _folder(tmp_path / "texts")
    (source / "empty.txt").touch()
    (source / "image.png").write_bytes(b"\x89PNG")
    summary = prepare([source], tmp_path / "tokens")
    assert _tokens(tmp_path / "tokens") == _expected(DOCUMENTS)
    assert (summary.num_empty, dict(summary.skipped)) == (1, {".png": 1})


def test_a_large_vocabulary_is_written_with_four_bytes(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"x": 1, "</s>": 70_000}, "unk_token": "x"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    (tmp_path / "text.txt").write_text("anything")
    prepare([tmp_path / "text.txt"], tmp_path / "tokens", tokenizer=str(tmp_path))
    assert _tokens(tmp_path / "tokens") == [1, 70_000]
    assert describe(tmp_path / "tokens").dtype == "uint32"
    assert (tmp_path / "tokens" / "shard-00000.bin").stat().st_size == 8


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_what_exists_is_never_written_over(
    tmp_path: Path, text_file: Path, kind: str, tokenizer: str
) -> None:
    output = tmp_path / "tokens"
    if kind == "file":
        output.write_text("mine")
    elif kind == "folder":
        output.mkdir()
    else:
        output.symlink_to("nowhere")
    with pytest.raises(DataError) as raised:
        prepare([text_file], output, tokenizer=tokenizer)
    assert raised.value.rules == ("data-output-exists",)
    if kind == "file":
        assert output.read_text() == "mine"


def test_a_read_only_output_is_refused(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentProblem) as raised:
        prepare([text_file], tmp_path / "tokens")
    assert raised.value.rules == ("data-output-writable",)
    assert "Read-only file system" in str(raised.value)


_LIMITED = """
import resource, signal, sys
from echelon.core.errors import EnvironmentProblem
from echelon.training.data.prepare import prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
try:
    prepare([sys.argv[1]], sys.argv[2])
except EnvironmentProblem as error:
    print(error.rules)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_a_limit_of_the_system_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    """The write itself fails here, half-way, as it does on a full disk."""
    source = tmp_path / "long.txt"
    source.write_text("a line of text\n" * 200_000)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LIMITED, str(source), str(tmp_path / "tokens")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("('data-disk-full',)\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


_SLOW = """
import sys, time
from echelon.training.data import prepare as module
from echelon.training.data.tokenizer import ByteTokenizer
encode = ByteTokenizer.encode_chunks
def slow(self, pieces):
    print("encoding", flush=True)
    time.sleep(60)
    return encode(self, pieces)
ByteTokenizer.encode_chunks = slow
module.prepare([sys.argv[1]], sys.argv[2])
"""


def test_a_killed_process_leaves_no_output(tmp_path: Path, text_file: Path) -> None:
    command = [sys.executable, "-c", _SLOW, str(text_file), str(tmp_path / "tokens")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "encoding\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "tokens").exists()
    prepare([text_file], tmp_path / "tokens")
    assert len(_tokens(tmp_path / "tokens")) == 2001


def test_ctrl_c_removes_what_was_written(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: ByteTokenizer, pieces: list[bytes]) -> list[np.ndarray]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode_chunks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare([text_file], tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_sources_without_any_text_are_refused(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    with pytest.raises(DataError) as raised:
        prepare([tmp_path / "texts"], tmp_path / "tokens", tokenizer=tokenizer)
    assert raised.value.rules == ("data-empty",)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_damaged_output_is_not_described(tmp_path: Path, text_file: Path) -> None:
    prepare([text_file], tmp_path / "tokens")
    with (tmp_path / "tokens" / "shard-00000.bin").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(DataError) as raised:
        describe(tmp_path / "tokens")
    assert raised.value.rules == ("data-shard-size",)


def test_an_edited_output_is_not_described(tmp_path: Path, text_file: Path) -> None:
    prepare([text_file], tmp_path / "tokens")
    shard = tmp_path / "tokens" / "shard-00000.bin"
    shard.write_bytes(b"xx" + shard.read_bytes()[2:])
    with pytest.raises(DataError) as raised:
        describe(tmp_path / "tokens")
    assert raised.value.rules == ("data-shard-hash",)
