# SPDX-License-Identifier: Apache-2.0
"""Read a foreign file: JSON, YAML, TOML or a command, into keys with dots and their values.

Of the command line of a training script these are launcher flags, and the flags behind the script;
`shell.py` fills in the variables of a shell script.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from echelon.config.reading import missing_file
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.interop import IMPORT_SYNTAX
from echelon.core.serialize import decode_json
from echelon.interop.shell import script_commands

_JSON_COMMENT = re.compile(r"^[ \t]*//.*$", re.MULTILINE)
_COMMENTED_JSON = re.compile(r"\A(\s*//.*\n)*\s*\{")


def read_text(path: Path) -> str:
    """Return the text of a file; ConfigError where it cannot be read.

    Lines of comments in a JSON are blank.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _JSON_COMMENT.sub("", text) if _COMMENTED_JSON.match(text) else text
    except UnicodeDecodeError as error:
        raise ConfigError(syntax_problem(path, f"is not UTF-8 text: {error.reason}")) from error
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(path, error, str(path))) from error


def parse_json(path: Path, text: str) -> Mapping[str, object]:
    """Return the object of a JSON text; ConfigError where it is none."""
    try:
        data = decode_json(text, pairs=_no_duplicates)
    except ValueError as error:
        raise ConfigError(syntax_problem(path, f"is not JSON: {error}")) from error
    return _table(path, data, "a JSON object")


def parse_yaml(path: Path, text: str) -> Mapping[str, object]:
    """Return the mapping of a YAML text; ConfigError where it is none."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Read plain values only, and no key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Return the mapping of a node."""
            self.flatten_mapping(node)
            make: Callable[..., Any] = cast(Any, self).construct_object
            return _no_duplicates(
                [(make(key, deep=True), make(value, deep=True)) for key, value in node.value]
            )

    try:
        data = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(syntax_problem(path, f"is not YAML: {message}")) from error
    return _table(path, data, "a YAML mapping")


def parse_toml(path: Path, text: str) -> Mapping[str, object]:
    """Return the tables of a TOML text; ConfigError where it is none."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(syntax_problem(path, f"is not TOML: {error}")) from error


def flatten_keys(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of everything in nested tables."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flatten_keys(cast("dict[str, object]", value), f"{key}.")
        else:
            yield key, value


def syntax_problem(path: Path, what: str) -> Problem:
    """Return the problem of a file that is not what its kind says."""
    return IMPORT_SYNTAX.problem(f"{path} {what}", key="FILE", set_by=str(path))


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there twice")
        found[key] = value
    return found


def _table(path: Path, data: object, wanted: str) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(syntax_problem(path, f"is not {wanted}"))
    return {str(key): value for key, value in cast("dict[object, object]", data).items()}


_FLAG = re.compile(r"--\w[\w-]*")
_WHOLE = re.compile(r"[+-]?\d+")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_command(path: Path, words: Sequence[str]) -> Mapping[str, object]:
    """Return the flags of a command, each with its value, a list of values, or true.

    Where a flag stands twice the last counts, as it does for the parsers of the tools. ConfigError
    where there is none.
    """
    flags = {flag: flag_value(values) for flag, values in _flags(words)}
    if not flags:
        raise ConfigError(syntax_problem(path, "holds no command with --flags"))
    return flags


def command_words(path: Path, text: str) -> list[str]:
    """Return the words of the command in a script that trains; ConfigError where there is none.

    It is the one with the most flags. What a variable holds that the script does not set is not
    known: its name stays.
    """
    try:
        commands = script_commands(text)
    except ValueError as error:
        raise ConfigError(syntax_problem(path, f"is no command: {error}")) from error
    return max(commands, key=lambda words: sum(map(_is_flag, words)), default=list[str]())


def _is_flag(word: str) -> bool:
    return _FLAG.match(word) is not None


def _flags(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words behind it, up to the script or a flag."""
    flag, values = "", list[str]()
    for word in words:
        starts = _is_flag(word)
        if flag and (starts or (word.endswith(".py") and values)):
            yield flag, values
            flag = ""
        if starts:
            name, equals, value = word.partition("=")
            flag, values = f"--{name[2:].replace('_', '-')}", [value] if equals else []
        elif flag:
            values.append(word)
    if flag:
        yield flag, values


def flag_value(values: list[str]) -> object:
    """Return the words behind a flag as its value: true, a number or a word, or a list of them."""
    plain = [_number(value) for value in values]
    if not plain:
        return True
    return plain[0] if len(plain) == 1 else plain


def _number(word: str) -> object:
    if _WHOLE.fullmatch(word):
        return int(word)
    return float(word) if _REAL.fullmatch(word) else word
