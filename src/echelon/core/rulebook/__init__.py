# SPDX-License-Identifier: Apache-2.0
"""Every rule that an error can name, one file per area.

`echelon explain` reads the rules from here, without torch. A new area is a new file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from echelon.core.rules import Rule


def areas() -> Mapping[str, tuple[Rule, ...]]:
    """Return the rules of every area (file) of the rulebook, each in the order of its file."""
    found: dict[str, tuple[Rule, ...]] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        members = vars(import_module(f"{__name__}.{module.name}"))
        found[module.name] = tuple(rule for rule in members.values() if isinstance(rule, Rule))
    return found


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, area after area."""
    return tuple(rule for rules in areas().values() for rule in rules)
