# SPDX-License-Identifier: Apache-2.0
"""Find the files of a corpus: what is there, in which order, and in which format each is read.

Files of a folder come sorted by their path, so the same folder gives the same tokens everywhere.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal, cast, get_args

from echelon.config.files.new_file import free_name
from echelon.core.disk import is_plain_name
from echelon.core.errors import DataError, Problem
from echelon.core.rulebook.data import (
    DATA_EMPTY,
    DATA_FORMAT_KNOWN,
    DATA_SOURCE_UNREADABLE,
    DATA_SPLIT_KNOWN,
)
from echelon.core.rules import did_you_mean
from echelon.core.serialize import decode_json
from echelon.training.data.urls import is_url, url_files

FileFormat = Literal["text", "jsonl", "parquet", "arrow", "chat"]
SourceFormat = Literal["auto", "text", "jsonl", "parquet", "arrow", "chat"]

# fmt: off
_TEXT_SUFFIXES = (
    ".c", ".cc", ".cpp", ".css", ".cu", ".go", ".h", ".hpp", ".html", ".java", ".jl", ".js", ".kt",
    ".lua", ".md", ".org", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".rst", ".scala", ".sh",
    ".sql", ".swift", ".tex", ".text", ".toml", ".ts", ".txt", ".yaml", ".yml",
)
# fmt: on
_FORMATS: dict[str, FileFormat] = {
    **dict.fromkeys(_TEXT_SUFFIXES, "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# How the datasets library and the Hugging Face hub name the files of a split.
_SPLIT_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Name one file to read: `name` is its path inside the source, with forward slashes.

    One that is read over a network has a `url`, of which `path` is the path.
    """

    path: Path
    name: str
    format: FileFormat
    url: str = ""

    @property
    def place(self) -> str:
        """Return where it is, as people are told."""
        return self.url or str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """List the files to read in order, and count by suffix those that were passed over."""

    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])


def find_files(
    sources: Sequence[str | Path], *, format: SourceFormat = "auto", split: str = "train"
) -> SourceFiles:
    """Return the files of all `sources`; DataError with every problem of every source.

    Chats are files of JSON lines that are read in another way.
    """
    assert format in get_args(SourceFormat), format
    if format == "chat":
        found = find_files(sources, format="jsonl", split=split)
        if other := [file.place for file in found.files if file.format != "jsonl"]:
            raise DataError(
                DATA_FORMAT_KNOWN.problem(f"{', '.join(other[:4])}: chats are files of JSON lines")
            )
        return replace(found, files=tuple(replace(file, format="chat") for file in found.files))
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    if not sources:
        raise DataError(DATA_EMPTY.problem("no source was given"))
    for source in sources:
        try:
            if is_url(source):
                found = _find_url(str(source), format, split)
            else:
                found = _find_one(Path(source), format, split)
        except DataError as error:
            problems += error.problems
        else:
            files += found.files
            skipped.update(found.skipped)
    if problems:
        raise DataError(problems)
    return SourceFiles(files=tuple(files), skipped=dict(sorted(skipped.items())))


def require_source(source: str) -> None:
    """Refuse a path that is not there; "stdlib" and URLs are looked at when they are read."""
    if source != "stdlib" and "://" not in source and not Path(source).exists():
        _find_one(Path(source), "auto", "")


def _find_one(source: Path, format: SourceFormat, split: str) -> SourceFiles:
    if source.is_file():
        return SourceFiles(files=(_explicit_file(source, format),))
    if not source.is_dir():
        there = "neither a file nor a folder" if source.exists() else "not there"
        raise DataError(
            DATA_SOURCE_UNREADABLE.problem(
                f"source {source} is {there}", suggestions=_siblings(source)
            )
        )
    try:
        if (source / "dataset_dict.json").is_file():
            return _dataset_dict(source, split)
        if (source / "state.json").is_file():
            return _saved_dataset(source)
        return _folder(source, format, split)
    except OSError as error:
        raise DataError(unreadable(source, error)) from error


def _find_url(url: str, format: SourceFormat, split: str) -> SourceFiles:
    listed = url_files(url)
    one_file = len(listed) == 1 and listed[0][0] == url
    skipped: Counter[str] = Counter()
    files: list[SourceFile] = []
    for place, name in listed:
        path = PurePosixPath(name)
        known = format_of(path) if format == "auto" or not one_file else format
        if known is None or format not in ("auto", known):
            skipped[path.suffix or path.name] += 1
        else:
            files.append(SourceFile(path=Path(name), name=name, format=known, url=place))
    if any(file.format != "text" for file in files):
        skipped.update(file.path.suffix for file in files if file.format == "text")
        files = [file for file in files if file.format != "text"]
    files, others = _of_split(url, files, split)
    skipped.update(others)
    if not files:
        seen = ", ".join(f"{count} x {suffix}" for suffix, count in skipped.most_common(5))
        rule = DATA_FORMAT_KNOWN if one_file else DATA_EMPTY
        raise DataError(
            rule.problem(
                f"{url} has no file of a known format (there: {seen or 'nothing'})",
                suggestions=[f"--format {name}" for name in get_args(FileFormat)] * one_file,
            )
        )
    return SourceFiles(files=tuple(files), skipped=skipped)


def _explicit_file(path: Path, format: SourceFormat) -> SourceFile:
    known = format_of(path) if format == "auto" else format
    if known is None:
        folder = path.with_suffix("")
        raise DataError(
            DATA_FORMAT_KNOWN.problem(
                f"the name of {path} does not say what is inside",
                suggestions=[
                    f"echelon data prepare {path} --format {name} --out {free_name(folder)}"
                    for name in get_args(FileFormat)
                ],
            )
        )
    if not os.access(path, os.R_OK):
        raise DataError(DATA_SOURCE_UNREADABLE.problem(f"{path} may not be read by this user"))
    if path.stat().st_size == 0:
        raise DataError(
            DATA_EMPTY.problem(f"{path} has 0 bytes", suggestions=(*_siblings(path), "stdlib"))
        )
    return SourceFile(path=path, name=path.name, format=known)


def format_of(path: PurePath) -> FileFormat | None:
    """Return the format that the name of `path` states; None where it states none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    zipped = suffixes[-1:] == [".gz"]
    if zipped:
        suffixes.pop()
    known = _FORMATS.get(suffixes[-1]) if suffixes else None
    return None if zipped and known in ("parquet", "arrow") else known


def _folder(folder: Path, format: SourceFormat, split: str) -> SourceFiles:
    """Return the files below `folder`: records where there are any, else text."""
    skipped: Counter[str] = Counter()
    files: list[SourceFile] = []
    for path in _walk(folder):
        known = format_of(path)
        if known is None or format not in ("auto", known):
            skipped[path.suffix or path.name] += 1
        else:
            name = path.relative_to(folder).as_posix()
            files.append(SourceFile(path=path, name=name, format=known))
    if any(file.format != "text" for file in files):
        # A README beside the records describes the corpus and is no part of it.
        skipped.update(file.path.suffix for file in files if file.format == "text")
        files = [file for file in files if file.format != "text"]
    files, others = _of_split(folder, files, split)
    skipped.update(others)
    if not files:
        seen = ", ".join(f"{count} x {suffix}" for suffix, count in skipped.most_common(5))
        wanted = "a known format" if format == "auto" else f"format {format}"
        raise DataError(
            DATA_EMPTY.problem(
                f"{folder} has no file of {wanted} (there: {seen or 'nothing'})",
                suggestions=(*_siblings(Path(folder)), "stdlib"),
            )
        )
    return SourceFiles(files=tuple(files), skipped=skipped)


def _of_split(
    folder: Path | str, files: list[SourceFile], split: str
) -> tuple[list[SourceFile], Iterator[str]]:
    """Return the files of `split` where file names tell several splits apart, else all."""
    splits = [_split_of(file) for file in files]
    named = sorted({name for name in splits if name})
    if len(named) < 2:
        return files, iter(())
    if split not in named:
        raise DataError(_unknown_split(folder, split, named))
    kept = [file for file, name in zip(files, splits, strict=True) if name in (split, None)]
    dropped = (f"split {name}" for name in splits if name not in (split, None))
    return kept, dropped


def _split_of(file: SourceFile) -> str | None:
    match = _SPLIT_FILE.fullmatch(file.path.name.split(".")[0])
    return match.group(1) if match else None


def _dataset_dict(folder: Path, split: str) -> SourceFiles:
    """Return the files of one split of what `DatasetDict.save_to_disk` wrote."""
    splits = [str(name) for name in _read_list(folder / "dataset_dict.json", "splits")]
    if split not in splits:
        raise DataError(_unknown_split(folder, split, splits))
    found = _saved_dataset(folder / split)
    return SourceFiles(
        files=found.files, skipped={f"split {name}": 1 for name in splits if name != split}
    )


def _saved_dataset(folder: Path) -> SourceFiles:
    """Return the arrow files of what `Dataset.save_to_disk` wrote, in its order.

    Its state.json lists them: caches of earlier computations may lie beside them.
    """
    names = [
        str(cast("dict[str, object]", entry).get("filename"))
        for entry in _read_list(folder / "state.json", "_data_files")
        if isinstance(entry, dict)
    ]
    if not names:
        raise DataError(DATA_EMPTY.problem(f"{folder / 'state.json'} lists no data files"))
    if outside := [name for name in names if not is_plain_name(name)]:
        raise DataError(
            DATA_SOURCE_UNREADABLE.problem(
                f"{folder / 'state.json'} names files outside of its folder: "
                f"{', '.join(outside[:4])}"
            )
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            DATA_SOURCE_UNREADABLE.problem(
                f"{folder / 'state.json'} lists {len(names)} data files, of which {len(missing)} "
                f"are missing: {', '.join(missing[:4])}"
            )
        )
    return SourceFiles(
        files=tuple(SourceFile(path=folder / name, name=name, format="arrow") for name in names)
    )


def _read_list(path: Path, key: str) -> list[object]:
    """Return the list under `key` of the object in a file; an empty one where there is none."""
    try:
        data = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(unreadable(path, error)) from error
    found = cast("dict[str, object]", data).get(key) if isinstance(data, dict) else None
    return cast("list[object]", found) if isinstance(found, list) else []


def _walk(folder: Path) -> Iterable[Path]:
    found: list[Path] = []
    # Without `onerror` a folder that may not be listed would be left out without a word.
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(
        (path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts
    )


def _raise(error: OSError) -> None:
    raise error


def unreadable(path: Path | str, error: Exception) -> Problem:
    """Return the problem of a file that cannot be read to its end."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = reason.splitlines()[0] if reason else type(error).__name__
    return DATA_SOURCE_UNREADABLE.problem(f"{path} cannot be read: {reason}")


def _unknown_split(folder: Path | str, split: str, splits: Sequence[str]) -> Problem:
    return DATA_SPLIT_KNOWN.problem(
        f"{folder} has no split {split!r}", suggestions=[f"--split {name}" for name in splits]
    )


def _siblings(path: Path) -> list[str]:
    """Return the files of a known format where `path` was looked for, those with a near name first.

    Text comes before JSON: a configuration is JSON, too.
    """
    parent = path.parent
    if not parent.is_dir():
        return []
    names = [name for name in sorted(os.listdir(parent)) if name[0] != "." and name != path.name]
    near = did_you_mean(path.name, names)
    known = [name for name in names if format_of(Path(name)) and (parent / name).stat().st_size]
    ordered = sorted(known, key=lambda name: (name not in near, name.endswith(".json")))
    return [str(parent / name) for name in ordered][:6]
