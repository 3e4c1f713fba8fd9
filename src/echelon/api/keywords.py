# SPDX-License-Identifier: Apache-2.0
"""What is wrong in the words of Python: the rules speak of flags, a program gave keywords.

`--cluster 8xh200 --pin tp=4` becomes `cluster="8xh200" with pins=["tp=4"]`, wherever an error says
so, once, where it leaves `ec.plan`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

from echelon.core.errors import ConfigError, Problem

_LISTS = {"--pin": "pins", "--set": "settings"}
"""Flags that are repeated, and the lists that they are in Python."""
_NUMBERS = frozenset({"--price"})
_FLAG = r"--(?:cluster|pin|set|trainer|objective|price) (?:'[^']*'|\S*[^\s,;:.])"
"""A flag and its value, without the sign that ends a part of a sentence."""
_END = r"(?=$|[\s)]|[,;:.](?:\s|$))"
_FLAGS = re.compile(rf"{_FLAG}(?: {_FLAG})*|--search\b")


@contextmanager
def errors_in_keywords(spelled: Mapping[str, str]) -> Iterator[None]:
    """Let a ConfigError name keywords instead of flags.

    `spelled` are settings, each as it was written: those of a layout become pins on their way.
    """
    try:
        yield
    except ConfigError as error:
        problems = [_in_keywords(problem, spelled) for problem in error.problems]
        raise error.with_problems(problems) from None


def _in_keywords(problem: Problem, spelled: Mapping[str, str]) -> Problem:
    def translated(text: str) -> str:
        # What was given is known to its end; of other values a space is the end.
        for flag, given in product(_LISTS, spelled):
            whole = re.escape(f"{flag} {given}") + _END
            text = re.sub(whole, lambda _, written=spelled[given]: written, text)
        return _FLAGS.sub(lambda found: keywords_from_flags(found[0]), text)

    return replace(
        problem,
        message=translated(problem.message),
        set_by=translated(problem.set_by),
        suggestions=tuple(map(translated, problem.suggestions)),
    )


def keywords_from_flags(flags: str) -> str:
    """Return flags with their values as the keywords of `ec.plan`."""
    if flags == "--search":
        return "search=True"
    try:
        words = shlex.split(flags)
    except ValueError:
        return flags
    lists: dict[str, list[str]] = {}
    found: list[str] = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag in _LISTS:
            lists.setdefault(_LISTS[flag], []).append(value)
        else:
            told = value if flag in _NUMBERS else json.dumps(value)
            found.append(f"{flag.removeprefix('--')}={told}")
    found += [f"{name}={json.dumps(values)}" for name, values in lists.items()]
    return " with ".join(found)
