"""Files that survive, names that stay in a folder, and what a disk's refusals mean to a user."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from echelon.core.disk import (
    disk_errors,
    flush_folder,
    is_plain_name,
    list_names,
    sha256_of_file,
    write_durably,
)
from echelon.core.errors import EnvironmentProblem


def test_a_file_is_written_once_and_has_the_sum_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_durably(path, b"abc")
    flush_folder(tmp_path)
    with pytest.raises(FileExistsError):
        write_durably(path, b"other")
    assert path.read_bytes() == b"abc"
    # FIPS 180-2, appendix B.1.
    assert sha256_of_file(path) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


@pytest.mark.parametrize(
    ("number", "rule"),
    [
        (errno.ENOSPC, "disk-space"),
        (errno.EDQUOT, "disk-space"),
        (errno.EROFS, "folder-writable"),
        (errno.EACCES, "folder-writable"),
        (errno.EIO, "disk-works"),
    ],
)
def test_a_refusal_is_told_by_what_mends_it(number: int, rule: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught, disk_errors("to write x"):
        raise OSError(number, "the reason")
    assert caught.value.rules == (rule,)
    assert caught.value.problems[0].message == "the disk refused to write x: the reason"


def test_a_plain_name_is_of_something_in_the_folder() -> None:
    assert all(is_plain_name(name) for name in ("a", "a.b", "...", ".hidden", "a b"))
    assert not any(is_plain_name(name) for name in ("", ".", "..", "a/b", "/", "../a", "a\0b"))


def test_the_names_of_a_folder_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    assert list_names(tmp_path) == f"{tmp_path} is empty"
    (tmp_path / "sub").mkdir()
    for name in ("b", "a"):
        (tmp_path / name).touch()
    assert list_names(tmp_path) == f"{tmp_path} holds a, b, sub/"
    assert list_names(tmp_path, limit=1) == f"{tmp_path} holds a and 2 more"
    assert list_names(tmp_path / "a") == f"{tmp_path / 'a'} is no folder"
    assert list_names(tmp_path / "c") == f"{tmp_path / 'c'} does not exist"
