# SPDX-License-Identifier: Apache-2.0
"""Read a file whose tool hands its keys on to another: as that other's, under its own names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import KeyReader, Refusal, json_text

_FLAG = re.compile(r"--[a-z][\w-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Hold flags of the other tool, and of each flag the key that it comes from.

    `names` are the keys of flags that the file does not have, so that its defaults have a name too.
    """

    flags: Mapping[str, object]
    origins: Mapping[str, str]
    names: Mapping[str, str]

    def name(self, flag: str) -> str:
        """Return the key of a flag; the flag itself where it has none."""
        return self.origins.get(flag) or self.names.get(flag) or flag

    def text(self, text: str) -> str:
        """Return a text with keys for flags."""
        return _FLAG.sub(lambda match: self.name(match[0]), text)


def read_translated(
    reader: KeyReader,
    translation: Translation,
    read_keys: Callable[[KeyReader, ImportContext], None],
    context: ImportContext,
) -> None:
    """Note in `reader` what becomes of its keys when the other tool reads them as its flags."""
    other = KeyReader(tool=reader.tool, path=reader.path, given=translation.flags)
    read_keys(other, context)
    for setting, entry in other.entries.items():
        reader.entries[setting] = replace(entry, source=translation.text(entry.source))
    for row in other.rows:
        key = translation.name(row.key)
        given = json_text(reader.given[key]) if key in reader.given else row.given
        why = translation.text(row.why)
        reader.rows.append(replace(row, key=key, given=given, why=why))
    for refusal in other.refusals:
        problem = replace(
            refusal.problem,
            message=translation.text(refusal.problem.message),
            key=translation.text(refusal.problem.key),
            set_by=translation.text(refusal.problem.set_by),
            suggestions=tuple(map(translation.text, refusal.problem.suggestions)),
        )
        keys = tuple(map(translation.name, refusal.keys))
        reader.refusals.append(Refusal(keys=keys, problem=problem))
    reader.assumptions.extend(map(translation.text, other.assumptions))
    reader.known.update(dict.fromkeys(translation.origins.values()))
