"""The command line of a training script: launcher flags, the script, and the flags behind it.

Comments and line continuations are those of a shell; a variable is refused, because its value
stands elsewhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from echelon.config.foreign.sources import syntax_problem
from echelon.core.errors import ConfigError

_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")
_VARIABLE = re.compile(r"\$[{(]*\w+")
_SHELL = re.compile(r"\|\|?|&&?|;|\d?>.*|<.*")
_WHOLE = re.compile(r"[+-]?\d+")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_command(path: Path, text: str) -> Mapping[str, object]:
    """Return the flags of a command, each with its value, a list of values, or true.

    ConfigError where there is no command, or where a flag stands twice.
    """
    lines = [_COMMENT.sub("", line).rstrip().removesuffix("\\") for line in text.splitlines()]
    plain = " ".join(lines)
    if variable := _VARIABLE.search(plain):
        raise ConfigError(
            syntax_problem(
                path,
                f"holds {variable.group()}: its value is not known here; write the command out, "
                "as `set -x` shows it",
            )
        )
    try:
        words = shlex.split(plain)
    except ValueError as error:
        raise ConfigError(syntax_problem(path, f"is no command: {error}")) from error
    flags: dict[str, object] = {}
    for flag, values in _flags(words):
        if flag in flags:
            raise ConfigError(syntax_problem(path, f"has {flag} twice"))
        flags[flag] = _value(values)
    if not flags:
        raise ConfigError(syntax_problem(path, "holds no command with --flags"))
    return flags


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words behind it, up to the script, a flag, or another command."""
    flag, values = "", list[str]()
    for word in words:
        starts = word.startswith("--") and len(word) > 2
        ends = word.endswith(".py") and bool(values)
        if flag and (starts or ends or _SHELL.fullmatch(word)):
            yield flag, values
            flag = ""
            if not (starts or ends):
                return
        if starts:
            name, equals, value = word.partition("=")
            flag, values = f"--{name[2:].replace('_', '-')}", [value] if equals else []
        elif flag:
            values.append(word)
    if flag:
        yield flag, values


def _value(values: list[str]) -> object:
    plain = [_number(value) for value in values]
    if not plain:
        return True
    return plain[0] if len(plain) == 1 else plain


def _number(word: str) -> object:
    if _WHOLE.fullmatch(word):
        return int(word)
    return float(word) if _REAL.fullmatch(word) else word
