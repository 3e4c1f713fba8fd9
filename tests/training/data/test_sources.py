"""Which files a source has, in which order and format; what is wrong is told at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import DataError
from echelon.training.data.sources import find_files, format_of


def _write(folder: Path, names: Iterable[str]) -> None:
    """Write files whose content does not matter: their names say the format."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def _names(source: Path, **options: Any) -> list[str]:
    return [file.name for file in find_files([source], **options).files]


def _refused(*sources: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as raised:
        find_files(sources, **options)
    return raised.value


def _save_to_disk(folder: Path) -> None:
    """Write the files that `Dataset.save_to_disk` writes, in two parts, and a cache beside them."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    _write(folder, [*names, "cache-0123456789abcdef.arrow"])
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.PY", "text"),
        ("a.txt.gz", "text"),
        ("a.ndjson", "jsonl"),
        ("a.b.jsonl.gz", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.arrow.gz", None),  # only lines and text are read while they are unzipped
        ("a.png", None),
        ("README", None),
        ("a.gz", None),
    ],
)
def test_the_name_says_the_format(name: str, expected: str | None) -> None:
    assert format_of(Path(name)) == expected


def test_a_stated_format_wins_over_the_name_of_a_file(tmp_path: Path) -> None:
    _write(tmp_path, ["corpus.dump"])
    (found,) = find_files([tmp_path / "corpus.dump"], format="jsonl").files
    assert (found.name, found.format) == ("corpus.dump", "jsonl")


def test_a_saved_dataset_is_what_its_state_lists(tmp_path: Path) -> None:
    _save_to_disk(tmp_path / "data")
    found = find_files([tmp_path / "data"])
    assert [file.name for file in found.files] == [f"data-0000{i}-of-00002.arrow" for i in (0, 1)]
    assert {file.format for file in found.files} == {"arrow"}
    assert found.skipped == {}


@pytest.mark.parametrize("name", ["../data-00000-of-00002.arrow", "..", "/etc/passwd"])
def test_a_saved_dataset_names_no_file_outside_of_it(tmp_path: Path, name: str) -> None:
    _save_to_disk(tmp_path / "data")
    shutil.copy(tmp_path / "data/data-00000-of-00002.arrow", tmp_path)
    (tmp_path / "data/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    error = _refused(tmp_path / "data")
    assert error.rules == ("data-source-unreadable",)
    assert "outside of its folder" in str(error)


def test_a_saved_dataset_with_missing_files_is_refused(tmp_path: Path) -> None:
    _save_to_disk(tmp_path)
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    error = _refused(tmp_path)
    assert error.rules == ("data-source-unreadable",)
    assert "lists 2 data files, of which 1 are missing" in str(error)
    for text, rule in (("{", "data-source-unreadable"), ("{}", "data-empty"), ("3", "data-empty")):
        (tmp_path / "state.json").write_text(text)
        assert _refused(tmp_path).rules == (rule,)


def test_a_saved_dataset_of_several_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _save_to_disk(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, other in (("train", "test"), ("test", "train")):
        found = find_files([tmp_path], split=split)
        assert {file.path.parent for file in found.files} == {tmp_path / split}
        assert dict(found.skipped) == {f"split {other}": 1}
    error = _refused(tmp_path, split="validation")
    assert error.rules == ("data-split-known",)
    assert error.problems[0].suggestions == ("--split train", "--split test")


def test_a_folder_as_the_hub_gives_it(tmp_path: Path) -> None:
    """Parquet files named by split below data/, a README beside them: only the split is read."""
    train = [f"data/train-0000{part}-of-00002.parquet" for part in (0, 1)]
    test = "data/test-00000-of-00001-0123456789abcdef.parquet"
    _write(tmp_path, [*reversed(train), test, "README.md", "data/rest.parquet"])
    assert _names(tmp_path) == ["data/rest.parquet", *train]
    assert _names(tmp_path, split="test") == ["data/rest.parquet", test]
    assert dict(find_files([tmp_path]).skipped) == {".md": 1, "split test": 1}
    assert _refused(tmp_path, split="dev").rules == ("data-split-known",)


def test_a_folder_is_read_in_the_order_of_paths(tmp_path: Path) -> None:
    names = ["a.txt", "b/0.txt", "b/1.txt", "b.txt"]
    _write(tmp_path, [*names[::-1], ".hidden/x.txt", "b/.x.txt", "a.png"])
    assert _names(tmp_path) == names
    assert dict(find_files([tmp_path]).skipped) == {".png": 1}


def test_all_bad_sources_are_reported_at_once(tmp_path: Path) -> None:
    _write(tmp_path, ["corpus.dump", "good.txt"])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "none").mkdir()
    names = ("gone.txt", "corpus.dump", "good.txt", "empty.txt", "none")
    error = _refused(*(tmp_path / name for name in names))
    assert error.rules == (
        "data-source-unreadable",
        "data-format-known",
        "data-empty",
        "data-empty",
    )
    # An empty file would be the next mistake.
    assert error.problems[0].suggestions == (str(tmp_path / "good.txt"),)
    dump = tmp_path / "corpus.dump"
    prepare = f"echelon data prepare {dump} --format jsonl --out {dump.with_suffix('')}"
    assert prepare in error.problems[1].suggestions
    assert _refused().rules == ("data-empty",)


def test_a_folder_of_other_files_names_what_is_there(tmp_path: Path) -> None:
    _write(tmp_path, ["a.png", "b.txt"])
    error = _refused(tmp_path, format="parquet")
    assert error.rules == ("data-empty",)
    assert "no file of format parquet (there: 1 x .png, 1 x .txt)" in str(error)
