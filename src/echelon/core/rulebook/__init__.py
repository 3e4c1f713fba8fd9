# SPDX-License-Identifier: Apache-2.0
"""Every rule that an error can name, by area.

`echelon explain` reads the rules from here, without torch. Rules of a file are of the area of its
name, or of the `Area` above them. A new area is a new file, or a new `Area` in one.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from echelon.core.rules import Area, Rule


def areas() -> Mapping[str, tuple[Rule, ...]]:
    """Return the rules of every area of the rulebook, each in the order of its file."""
    found: dict[str, list[Rule]] = {}
    for module in pkgutil.iter_modules(__path__):
        area = module.name
        for member in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(member, Area):
                area = member.name
            elif isinstance(member, Rule):
                found.setdefault(area, []).append(member)
    return {area: tuple(found[area]) for area in sorted(found)}


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, area after area."""
    return tuple(rule for rules in areas().values() for rule in rules)
