"""Models by the names that tables give them: sizes of the presets, for what a row leaves blank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from echelon.config.presets import preset_names, read_preset

Sizes = Mapping[str, Any]


@cache
def presets() -> Mapping[str, Sizes]:
    """Return the [model] table of every preset by its name without punctuation."""
    found: dict[str, Sizes] = {}
    for name in preset_names("models"):
        preset = read_preset("models", name)
        if preset is not None and "model" in preset.tables:
            found[_squeeze(name)] = cast(Sizes, preset.tables["model"])
    return found


def known_model(name: str) -> Sizes:
    """Return the sizes of the model that `name` speaks of, or an empty mapping.

    The longest preset's name that the given name begins with wins; a version's decimal may be
    missing: Llama-3 405B is Llama 3.1 405B.
    """
    wanted = _squeeze(name)
    spelt: dict[str, Sizes] = {}
    for key, sizes in presets().items():
        spelt.setdefault(key, sizes)
    for key, sizes in presets().items():
        short = re.sub(r"^(llama\d)1(?=\d+b)", r"\1", key)
        spelt.setdefault(short, sizes)
        spelt.setdefault(f"meta{short}", sizes)
    fits = [key for key in spelt if wanted.startswith(key)]
    return spelt[max(fits, key=len)] if fits else {}


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
