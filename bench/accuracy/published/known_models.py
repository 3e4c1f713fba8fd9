"""Models by the names that tables give them: sizes, for what a row leaves blank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from bench.accuracy.published.published_models import published_models
from echelon.config.presets import preset_names, read_preset

Sizes = Mapping[str, Any]


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
