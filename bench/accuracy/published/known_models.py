"""Models by the names that tables give them: sizes, for what a row leaves blank.

Sizes are those of a preset, or of `bench/data/models.csv`, which has published models that are no
presets; a column such as "experts.top_k" is a key of a table of the model's.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from echelon.config.presets import preset_names, read_preset

Sizes = Mapping[str, Any]
DATA = Path(__file__).parents[2] / "data"
BOOLEANS = {"true": True, "false": False}


Words = tuple[str, ...]


@cache
def presets() -> Mapping[Words, Sizes]:
    """Return the [model] table of every preset, and the like of others, by words of the name."""
    found: dict[Words, Sizes] = {}
    for name, sizes in published_models().items():
        found[words(name)] = sizes
    for name in preset_names("models"):
        preset = read_preset("models", name)
        if preset is not None and "model" in preset.tables:
            sizes = cast(Sizes, preset.tables["model"])
            found[words(name)] = sizes
            # Tables leave out a minor version: Llama-3 405B is Llama 3.1 405B.
            found.setdefault(words(re.sub(r"(\d)\.\d", r"\1", name)), sizes)
    return found


def known_model(name: str) -> Sizes:
    """Return the sizes of the preset whose words the name begins with, the longest; else none."""
    wanted = words(name.lower().removeprefix("meta").strip())
    fits = [key for key in presets() if wanted[: len(key)] == key]
    return presets()[max(fits, key=len)] if fits else {}


def words(name: str) -> Words:
    """Return the words of a name: ``Qwen3 30B-A3B`` -> qwen, 3, 30b, a, 3b."""
    return tuple(re.findall(r"\d+x?\d*[a-z]*|[a-z]+", name.lower()))


def data_rows(file: str) -> list[dict[str, str]]:
    """Return the rows of a table of `bench/data`, each without its blank cells."""
    with (DATA / file).open(encoding="utf-8", newline="") as lines:
        return [{k: cell for k, cell in row.items() if cell} for row in csv.DictReader(lines)]


def data_tables(file: str) -> dict[str, Any]:
    """The tables of a TOML file of `bench/data`."""
    return tomllib.loads((DATA / file).read_text(encoding="utf-8"))


@cache
def published_models() -> Mapping[str, Sizes]:
    """Return the models of the table by name, as tables of a preset's [model]."""
    found: dict[str, dict[str, Any]] = {}
    for row in data_rows("models.csv"):
        sizes = found.setdefault(row.pop("name"), {})
        row.pop("source")
        for key, cell in row.items():
            table, _, name = key.rpartition(".")
            target = sizes.setdefault(table, {}) if table else sizes
            target[name] = BOOLEANS[cell] if cell in BOOLEANS else int(cell)
    return found
