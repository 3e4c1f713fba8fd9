"""Tokens are cut into shards and committed as a whole; what fails leaves nothing."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter, HashedFile


def _add(writer: DatasetWriter, *tokens: int, ends_document: bool = True) -> None:
    writer.add(np.array(tokens, dtype=np.uint32), ends_document=ends_document)


def test_shards_are_full_and_documents_end_where_they_end(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", ByteTokenizer(), shard_tokens=3) as writer:
        _add(writer, 1, 2, ends_document=False)
        _add(writer, 3, 4)
        _add(writer, ends_document=False)
        _add(writer)
        _add(writer, *range(10, 17))
        index = writer.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    expected = [1, 2, 3, 4, 256, 256, *range(10, 17), 256]
    stored = [tmp_path / "data" / shard.file for shard in index.shards]
    assert [np.fromfile(path, "<u2").tolist() for path in stored] == [
        expected[start : start + 3] for start in range(0, len(expected), 3)
    ]
    assert [shard.count for shard in index.shards] == [3, 3, 3, 3, 2]
    for path, shard in zip(stored, index.shards, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256
    ends = np.fromfile(tmp_path / "data" / index.documents.file, "<u8")
    assert ends.tolist() == [5, 6, 14]
    assert (index.num_tokens, index.documents.count, index.max_token) == (14, 3, 256)
    dataset = TokenDataset.open(tmp_path / "data", verify=True)
    assert dataset.tokens(0, 14).tolist() == expected


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_exists_is_never_written_over(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "data"
    if kind == "file":
        output.write_text("mine")
    elif kind == "folder":
        output.mkdir()
    else:
        output.symlink_to("nowhere")
    with pytest.raises(DataError) as raised:
        DatasetWriter(output, ByteTokenizer(), shard_tokens=1)
    assert raised.value.rules == ("data-output-exists",)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, None])
def test_leaving_before_the_commit_removes_everything(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    def leave() -> None:
        with DatasetWriter(tmp_path / "data", ByteTokenizer(), shard_tokens=2) as writer:
            _add(writer, 1, 2, 3)
            if error is not None:
                raise error

    if error is None:
        leave()
    else:
        with pytest.raises(error):
            leave()
    assert list(tmp_path.iterdir()) == []


def test_no_document_is_no_data(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError) as raised,
        DatasetWriter(tmp_path / "data", ByteTokenizer(), shard_tokens=2) as writer,
    ):
        writer.commit()
    assert raised.value.rules == ("data-empty",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["mine", None])
def test_an_output_that_appears_before_the_rename_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """With content the rename itself is refused: another process won the race."""
    output = tmp_path / "data"
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        output.mkdir()
        (output / "mine").touch()
        return rename(self, target)

    with DatasetWriter(output, ByteTokenizer(), shard_tokens=2) as writer:
        _add(writer, 1)
        if content is None:
            output.mkdir()
        else:
            monkeypatch.setattr(Path, "rename", late)
        with pytest.raises(DataError) as raised:
            writer.commit()
    assert raised.value.rules == ("data-output-exists",)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert [path.name for path in output.iterdir()] == ([] if content is None else ["mine"])


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(EnvironmentProblem) as raised,
        DatasetWriter(tmp_path / "file" / "data", ByteTokenizer(), shard_tokens=2),
    ):
        pass
    assert raised.value.rules == ("data-output-writable",)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("when", ["write", "close"])
@pytest.mark.parametrize(
    ("code", "rule"), [(errno.ENOSPC, "data-disk-full"), (errno.EROFS, "data-output-writable")]
)
def test_a_refusal_of_the_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, code: int, rule: str
) -> None:
    original = getattr(HashedFile, when)

    def refuse(self: HashedFile, *args: bytes) -> object:
        if self.path.name == "shard-00001.bin":
            raise OSError(code, os.strerror(code))
        return original(self, *args)

    monkeypatch.setattr(HashedFile, when, refuse)
    with (
        pytest.raises(EnvironmentProblem) as raised,
        DatasetWriter(tmp_path / "data", ByteTokenizer(), shard_tokens=600) as writer,
    ):
        _add(writer, *[7] * 1800)
    assert raised.value.rules == (rule,)
    assert os.strerror(code) in str(raised.value)
    if code == errno.ENOSPC:
        written = "1.17 KiB (600 tokens)" if when == "write" else "2.34 KiB (1200 tokens)"
        assert written in str(raised.value)
        assert "are free there" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
