"""Find the line on which each key of a TOML file is set; the standard parser does not tell.

A scanner of headers, keys and the extent of values. It runs after the parser has accepted the text,
so it may assume that the syntax is right. A key inside an inline table has its table's line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"[ \t]*\[\[?[ \t]*({_DOTTED})[ \t]*\]\]?")
_KEY = re.compile(rf"[ \t]*({_DOTTED})[ \t]*=")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]|.',
    re.DOTALL,
)


def key_lines(text: str) -> Mapping[str, int]:
    """Return the line (from 1) of every dotted key and table of valid TOML `text`."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in _statements(text):
        if header := _HEADER.match(line):
            table = _plain(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            name = _plain(key[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def line_of(key: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of `key`, or of the nearest table around it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    number = start = 1
    depth = 0
    statement = ""
    for token in _TOKEN.findall(text + "\n"):
        if token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        if token == "\n" and depth == 0:
            yield start, statement
            statement, start = "", number + 1
        elif not token.startswith("#"):
            statement += token
        number += token.count("\n")


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in re.findall(_PART, dotted))
