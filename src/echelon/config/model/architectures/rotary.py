# SPDX-License-Identifier: Apache-2.0
"""How rotary positions, and what stretches them, stand in a config.json of transformers."""

from __future__ import annotations

import math
from typing import cast

from echelon.config.model.architectures.record import Keys
from echelon.config.model.config_json import (
    DYNAMIC_ROPE,
    PLAIN_ROPE,
    STRETCHES,
    ConfigJsonReader,
    rope_entry,
    rope_type,
)
from echelon.core.model_shape import ModelShape, RopeScaling

ORIGINAL = "original_max_position_embeddings"
_NAMES = {
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "slow_turns": "beta_slow",
    "fast_turns": "beta_fast",
    "whole_dims": "truncate",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "attention_factor": "attention_factor",
}
"""What transformers calls fields of a stretch."""
_NEEDED = {
    "llama3": ("low_frequency_factor", "high_frequency_factor"),
    "linear": (),
    "yarn": (),
    "longrope": ("short_factors", "long_factors"),
}
_OPTIONAL = {
    "yarn": ("slow_turns", "fast_turns", "whole_dims", "attention_factor"),
    "longrope": ("attention_factor",),
}


def read_rope(reader: ConfigJsonReader, theta: float, part: float = 1.0) -> None:
    """Read how positions turn.

    `theta`, and `part` of a head that turns, hold where nothing is said.
    """
    key, value = rope_entry(reader.config)
    if value is not None and not isinstance(value, dict):
        reader.refuse(key, value)
        return
    rope = cast("dict[str, object]", value or {})
    reader.set("rope_theta", rope.get("rope_theta", reader.config.get("rope_theta", theta)), key)
    fraction = rope.get("partial_rotary_factor", reader.config.get("partial_rotary_factor", part))
    if fraction != 1.0:
        reader.set("rotary.fraction", fraction, key)
    read_stretch(reader, key, rope)


def read_stretch(reader: ConfigJsonReader, key: str, rope: dict[str, object]) -> None:
    """Read what stretches frequencies, of the table `rope` under `key`.

    "dynamic" changes nothing up to the positions that a model has.
    """
    kind = rope_type(rope)
    if kind in (PLAIN_ROPE, DYNAMIC_ROPE):
        return
    if not isinstance(kind, str) or kind not in STRETCHES:
        reader.refuse(key, rope, *({"rope_type": one} for one in (PLAIN_ROPE, *STRETCHES)))
        return
    # Kinds that were not there from the first are named; the first is what a table means.
    if kind != "llama3":
        reader.set("rope_scaling.kind", kind, key)
    longest, original = (
        reader.config.get("max_position_embeddings"),
        reader.config.get(ORIGINAL, rope.get(ORIGINAL)),
    )
    factor = rope.get("factor")
    if kind in ("yarn", "longrope"):
        original = longest if original is None else original
        factor = _ratio(longest, original) if factor is None else factor
    _set_or_miss(reader, key, kind, "factor", "factor", factor)
    if kind != "linear":
        _set_or_miss(reader, key, kind, "original_positions", ORIGINAL, original)
    for name in _NEEDED[kind]:
        _set_or_miss(reader, key, kind, name, _NAMES[name], rope.get(_NAMES[name]))
    for name in _OPTIONAL.get(kind, ()):
        if rope.get(_NAMES[name]) is not None:
            reader.set(f"rope_scaling.{name}", rope[_NAMES[name]], f"{key}.{_NAMES[name]}")
    if kind == "yarn" and rope.get("attention_factor") is None:
        _read_mscale(reader, key, rope, factor)


def _set_or_miss(
    reader: ConfigJsonReader, key: str, kind: str, name: str, hf_name: str, value: object
) -> None:
    if value is not None:
        reader.set(f"rope_scaling.{name}", value, f"{key}.{hf_name}")
    else:
        reader.missing(f"{key}.{hf_name}, which {kind} scaling needs", reader.where(key))


def _ratio(longest: object, original: object) -> object:
    if not isinstance(longest, int) or not isinstance(original, int) or original <= 0:
        return None
    return max(1.0, longest / original)


def _read_mscale(
    reader: ConfigJsonReader, key: str, rope: dict[str, object], factor: object
) -> None:
    """Read the factor of cosines as DeepSeek says it: a ratio of two sharpenings."""
    ours, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    numbers = [one for one in (ours, whole, factor) if isinstance(one, int | float)]
    if ours and whole and len(numbers) == 3:
        found = sharpening(numbers[2], numbers[0]) / sharpening(numbers[2], numbers[1])
        reader.set("rope_scaling.attention_factor", found, f"{key}.mscale")


def sharpening(factor: float, mscale: float) -> float:
    """Return by what YaRN sharpens scores, its root (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def write_rope(shape: ModelShape) -> Keys:
    """Return how positions turn."""
    keys: Keys = {"rope_scaling": None, "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        keys["rope_scaling"] = stretch_keys(shape.rope_scaling)
    return keys


def stretch_keys(scaling: RopeScaling) -> Keys:
    """Return the keys of a stretch, the base apart."""
    keys: Keys = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions is not None:
        keys[ORIGINAL] = scaling.original_positions
    for name in (*_NEEDED[scaling.kind], *_OPTIONAL.get(scaling.kind, ())):
        value = getattr(scaling, name)
        if value is not None:
            keys[_NAMES[name]] = (
                list(cast("tuple[float, ...]", value)) if isinstance(value, tuple) else value
            )
    return keys
