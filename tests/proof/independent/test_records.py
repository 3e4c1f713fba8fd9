"""Records of every kind are read as the trainer prepares them, and parts cut by the rule."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from echelon.core.optional import optional_package
from echelon.proof.independent.records import SourceText, Tokens, files_of, read_source
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.prepare import PrepareOptions, prepare, source_files

BYTES = Tokens(file=None, end=256, piece_bytes=5000)
TEXTS = ("one", "two \u00fc", "", "three")


def tokens_of(*texts: str) -> list[int]:
    return [token for text in texts if text for token in (*text.encode(), 256)]


def read(name: Path | str, max_bytes: int = 1000) -> list[int]:
    text = read_source(str(name), BYTES, chats=False, max_bytes=max_bytes)
    assert text.ends[-1] == text.num_tokens
    return list(text.tokens)


def lines() -> bytes:
    return "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS).encode()


def written(folder: Path, kind: str) -> Path:
    """Write the texts as a file of a kind."""
    file = folder / f"records.{kind}"
    if kind == "jsonl":
        file.write_bytes(lines())
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(lines()))
    elif kind == "parquet":
        table = arrow().table({"text": list(TEXTS)})
        optional_package("pyarrow.parquet", extra="data", purpose="a test").write_table(table, file)
    else:
        table = arrow().table({"text": list(TEXTS)})
        make = arrow().ipc.new_stream if kind == "arrow" else arrow().ipc.new_file
        file = folder / "records.arrow"
        with make(str(file), table.schema) as writer:
            writer.write_table(table)
    return file


def arrow() -> Any:
    return optional_package("pyarrow", extra="data", purpose="a test")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "arrow file"])
def test_records_of_each_kind_are_documents(tmp_path: Path, kind: str) -> None:
    assert read(written(tmp_path, kind)) == tokens_of(*TEXTS)


def test_files_of_a_folder_come_by_their_paths_and_records_before_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == tokens_of("a/z.txt", "a.txt", "b.txt")
    written(tmp_path, "jsonl")
    assert read(tmp_path) == tokens_of(*TEXTS)
    for split in ("train", "test"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_text(json.dumps({"text": split}))
    assert read(tmp_path) == tokens_of(*TEXTS, "train")
    prepare([tmp_path], tmp_path / "out")
    assert read(tmp_path / "out") == tokens_of(*TEXTS, "train")


def test_a_saved_folder_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    file = written(tmp_path / "train", "arrow")
    state = {"_data_files": [{"filename": file.name}]}
    (tmp_path / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "train" / "cache.arrow").write_bytes(b"")
    assert read(tmp_path) == tokens_of(*TEXTS)


def test_the_built_in_corpus_has_the_same_files() -> None:
    right = [file.path for file in source_files(["stdlib"], PrepareOptions()).files]
    assert files_of("stdlib") == right


@pytest.mark.parametrize("most", [1, 4, 9, 10, 11, 500])
def test_a_limit_cuts_at_the_same_byte(tmp_path: Path, most: int) -> None:
    file = written(tmp_path, "jsonl")
    prepare([file], tmp_path / "data", options=PrepareOptions(max_bytes=most))
    dataset = TokenDataset.open(tmp_path / "data")
    assert read(file, most) == dataset.tokens(0, dataset.num_tokens).tolist()


def test_prepared_tokens_are_read_from_their_files(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl")
    prepare([file], tmp_path / "data", options=PrepareOptions(shard_tokens=5))
    text = read_source(str(tmp_path / "data"), BYTES, chats=False, max_bytes=1)
    right = tokens_of(*TEXTS)
    assert len(text.tokens) == text.num_tokens == len(right)
    assert text.tokens[0:99] == right
    assert [text.tokens[place] for place in range(len(right))] == right
    assert text.answers is None
    assert text.ends[0:9] == [4, 11, 17]


@pytest.mark.parametrize(
    ("fraction", "cut"),
    [(0.2, 80), (0.25, 80), (0.15, 80), (0.1, 90), (0.4, 60), (0.9, 20)],
)
def test_the_cut_is_at_the_nearest_end_of_a_document(fraction: float, cut: int) -> None:
    """Documents of 20, 40, 20 and 20 tokens; a tenth is less than half of the last one."""
    ends = (20, 60, 80, 100)
    text = SourceText(tokens=range(100), ends=ends, answers=None, start=0, stop=100)
    training, held_out = text.split(fraction)
    expected = cut if fraction != 0.1 else 80
    assert (training.start, training.stop) == (0, expected)
    assert (held_out.start, held_out.stop) == (expected, 100)


def test_rows_lie_end_to_end_and_the_last_is_filled_up() -> None:
    tokens = [1, 2, 0, 3, 0, 0, 4]
    text = SourceText(tokens=tokens, ends=(3, 5, 6, 7), answers=None, start=0, stop=7)
    assert text.num_samples(4) == 2
    first, last = (text.row(sample, 4, 0, answers_only=False) for sample in (0, 1))
    assert (first.tokens, first.labels, first.documents) == ([1, 2, 0, 3], [2, 0, 3, 0], (0, 3))
    assert (last.tokens, last.labels) == ([0, 0, 4, 0], [0, 4, -100, -100])
    assert last.documents == (0, 2)


def test_of_answers_only_labels_count() -> None:
    answers = [False, True, False, True, True, False]
    text = SourceText(tokens=range(6), ends=(2, 6), answers=answers, start=0, stop=6)
    row = text.row(0, 4, 9, answers_only=True)
    assert (row.labels, row.documents) == ([1, -100, 3, 4], (0, 2))
    assert text.row(1, 4, 9, answers_only=True).labels == [-100] * 4
    assert text.row(0, 4, 9, answers_only=False).labels == [1, 2, 3, 4]
