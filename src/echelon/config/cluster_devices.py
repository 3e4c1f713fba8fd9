"""Which device of the catalogue a driver's name means: ``NVIDIA A100-SXM4-80GB``."""

from __future__ import annotations

import re
from typing import Any, cast

from echelon.config.presets import Preset, preset_names, read_preset


def known_device(name: str, memory_bytes: int) -> Preset | None:
    """Return the preset of the device that calls itself `name`; None where there is none.

    Of several by the same name it is the one on the same kind of board with the nearest memory.
    """
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    words = {preset: preset.split("-")[0] for preset in preset_names("clusters")}
    fits = {preset: word for preset, word in words.items() if word in squeezed and word != "cpu"}
    if not fits:
        return None
    longest = max(map(len, fits.values()))
    pcie = "pcie" in squeezed
    found = [
        preset
        for one, word in fits.items()
        if len(word) == longest and (preset := read_preset("clusters", one)) is not None
    ]
    boards = [preset for preset in found if preset.name.endswith("-pcie") == pcie] or found
    return min(boards, key=lambda preset: abs(_memory(preset) - memory_bytes))


def device_table(preset: Preset) -> dict[str, Any]:
    """Return what a preset says of its device."""
    return cast("dict[str, Any]", preset.tables["device"])


def _memory(preset: Preset) -> int:
    return cast(int, device_table(preset)["memory_bytes"])
