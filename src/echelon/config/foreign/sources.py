"""Read a foreign file: JSON, YAML, TOML or text, into keys with dots and their values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from echelon.config.files import missing_file
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.imports import IMPORT_SYNTAX


class Duplicate(ValueError):
    """A key that stands in a table twice."""


def read_text(path: Path) -> str:
    """Return the text of a file; ConfigError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(syntax_problem(path, f"is not UTF-8 text: {error.reason}")) from error
    except (OSError, ValueError) as error:
        raise ConfigError(missing_file(path, error, "the command line")) from error


def parse_json(path: Path, text: str) -> Mapping[str, object]:
    """Return the object of a JSON text; ConfigError where it is none."""
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
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


def flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of everything in nested tables."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flat(cast("dict[str, object]", value), f"{key}.")
        else:
            yield key, value


def syntax_problem(path: Path, what: str) -> Problem:
    """Return the problem of a file that is not what its kind says."""
    return IMPORT_SYNTAX.problem(f"{path} {what}", key="FILE", set_by=str(path))


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Duplicate(f"the key {key!r} stands there twice")
        found[key] = value
    return found


def _table(path: Path, data: object, wanted: str) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(syntax_problem(path, f"is not {wanted}"))
    return {str(key): value for key, value in cast("dict[object, object]", data).items()}
