# SPDX-License-Identifier: Apache-2.0
"""Files that a file names: their keys stand below the key that names them, as `deepspeed.KEY`.

So each has a row, can be refused and can be allowed like any other. Paths are meant from where the
trainer is started, which is a folder above the file as a rule: each of them is looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from echelon.interop.key_reader import KeyOutcome, KeyReader, Refusal
from echelon.interop.parsing import flatten_keys, parse_json, read_text
from echelon.interop.tools import TOOLS, ToolName


def follow_files(kind: ToolName, path: Path, given: Mapping[str, object]) -> Mapping[str, object]:
    """Return keys with those of the file that one of them names, where it is there.

    ConfigError where it is no JSON object.
    """
    key = TOOLS[kind].deepspeed_key
    name = given.get(key) if key else None
    if key is None or not isinstance(name, str):
        return given
    file = next(_places(path, name), None)
    if file is None:
        return given
    inner = flatten_keys(parse_json(file, read_text(file)))
    return {**given, **{f"{key}.{one}": value for one, value in inner}}


def _places(path: Path, name: str) -> Iterator[Path]:
    """Yield the files of a name: beside the file that has it, in folders above, and here."""
    named = Path(name).expanduser()
    for folder in (*path.absolute().parents, Path()):
        if (file := folder / named).is_file():
            yield file


def inner_reader(reader: KeyReader, key: str, tool: str) -> KeyReader | None:
    """Return a reader of the keys of a file that `key` names; None where it was not followed."""
    begin = f"{key}."
    given = {
        name.removeprefix(begin): value
        for name, value in reader.given.items()
        if name.startswith(begin)
    }
    if not given:
        return None
    return KeyReader(tool=tool, path=str(reader.given.get(key, key)), given=given)


def adopt(reader: KeyReader, key: str, inner: KeyReader) -> None:
    """Take over what became of the keys of a file that `key` names; its settings win."""
    begin = f"{key}."
    reader.skip(key, "the file is read: its keys stand below")
    reader.rows[:] = [_beside(row, inner) for row in reader.rows]
    reader.rows.extend(
        row if row.key.startswith("(") else replace(row, key=f"{begin}{row.key}")
        for row in inner.rows
    )
    reader.entries.update(inner.entries)
    reader.refusals.extend(
        Refusal(keys=tuple(f"{begin}{one}" for one in refusal.keys), problem=refusal.problem)
        for refusal in inner.refusals
    )
    reader.assumptions.extend(inner.assumptions)
    reader.known.update(dict.fromkeys(f"{begin}{one}" for one in (*inner.known, *inner.given)))


def _beside(row: KeyOutcome, inner: KeyReader) -> KeyOutcome:
    """Return what became of a key whose setting the file has, too."""
    entry = inner.entries.get(row.setting)
    if entry is None or entry.value == row.value:
        return row
    why = f"{inner.path} says {row.setting}, and is what counts"
    return replace(row, setting="", value=None, why=why)
