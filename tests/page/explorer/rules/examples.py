"""Settings that break one rule, made of settings that break none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.page.explorer.document import start_controls
from echelon.page.explorer.rules.finders import broken_rules
from tests.page.explorer.random_controls import tables


def broken(
    model: str = "llama3-8b", cluster: str = "64xa100-80gb", **changes: Any
) -> dict[str, str]:
    """Return the rules that changes of a legal start break, each with its message."""
    preset = next(one for one in tables()["models"] if one["name"] == model)
    place = next(one for one in tables()["clusters"] if one["name"] == cluster)
    controls = replace(start_controls(tables(), preset, place), **changes)
    found = broken_rules(tables(), controls, preset, place)
    return {one.rule: one.message for one in found}
