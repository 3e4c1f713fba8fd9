# SPDX-License-Identifier: Apache-2.0
"""Names as people write them: without case, and with spaces, dashes or nothing between the parts.

`RTX 4090`, `rtx-4090` and `RTX4090` are one name; so are `Llama-3-8B` and `llama3-8b`. The parts
of a name are its letters and its numbers, and only what stands between two of them may differ:
`qwen3-1.7b` is not `qwen3-17b`. A name that could mean several things means none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

NameParts = tuple[str, ...]
"""A name in words and numbers: ("rtx", "4090")."""


def name_parts(name: str) -> NameParts:
    """Return the letters and numbers of a name in lower case; a slash is kept."""
    return tuple(re.findall(r"\d+(?:\.\d+)*|[^\W\d_]+|/", name.lower()))


def find_name(typed: str, spellings: Mapping[str, str]) -> str | None:
    """Return what a typed name means; None where it means nothing, or several things.

    `spellings` are all names by what each of them means. One that is typed exactly wins.
    """
    if typed in spellings:
        return spellings[typed]
    wanted = name_parts(typed)
    found = {meant for spelt, meant in spellings.items() if name_parts(spelt) == wanted}
    return found.pop() if len(found) == 1 and wanted else None


def names_within(typed: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known names that begin with all parts of a typed one: of a100, those of 40 GB too.

    They are what a name may mean that is not said to its end, that with no further part first.
    """
    wanted = name_parts(typed)
    found = (name for name in known if wanted and name_parts(name)[: len(wanted)] == wanted)
    return tuple(sorted(found, key=lambda name: len(name_parts(name)) > len(wanted)))


def contains_name(text: str, name: str) -> bool:
    """Return whether the parts of a name stand together in a text: h100, not l4 in L40S."""
    inside, wanted = name_parts(text), name_parts(name)
    starts = range(len(inside) - len(wanted) + 1)
    return bool(wanted) and any(inside[at : at + len(wanted)] == wanted for at in starts)
