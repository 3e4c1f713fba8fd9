# SPDX-License-Identifier: Apache-2.0
"""Settings of parameter servers and of local SGD: when they update, what is left open."""

from __future__ import annotations

from typing import cast

from echelon.config.view import View, record
from echelon.core.choices.local_sgd import AllIslands, LocalSgd
from echelon.core.choices.updates import Updates

EVERY_KEY, ISLANDS_KEY = "local_sgd.every", "local_sgd.islands"
MIN_ISLANDS_KEY, RESTARTS_KEY = "local_sgd.min_islands", "local_sgd.restarts"
RATE_KEY, MOMENTUM_KEY = "local_sgd.outer_learning_rate", "local_sgd.outer_momentum"

NESTEROV = (0.7, 0.9)
"""Rate and momentum that DiLoCo found best for Nesterov's (Douillard et al., 2023, section 3)."""
AVERAGING = (1.0, 0.0)
"""Rate and momentum of plain SGD that make of islands their mean."""


def read_local_sgd(view: View) -> tuple[LocalSgd, dict[str, tuple[object, str]]]:
    """Return how often replicas meet, and value and source of what was left to us."""
    if not view.integer(EVERY_KEY):
        return LocalSgd(), {}
    outer = view.word("local_sgd.outer")
    derived: dict[str, tuple[object, str]] = {}
    found: dict[str, float] = {}
    for key, value in zip(
        (RATE_KEY, MOMENTUM_KEY), NESTEROV if outer == "nesterov" else AVERAGING, strict=True
    ):
        if view.value(key) == "auto":
            found[key], derived[key] = value, (value, f'derived: local_sgd.outer = "{outer}"')
        else:
            found[key] = view.number(key)
    islands = view.integer("mesh.dp_replicate")
    if view.value(ISLANDS_KEY) == "auto":
        derived[ISLANDS_KEY] = islands, "derived: mesh.dp_replicate"
    local = record(
        view,
        LocalSgd,
        "local_sgd",
        islands=islands,
        outer_learning_rate=found[RATE_KEY],
        outer_momentum=found[MOMENTUM_KEY],
        min_islands=min_islands_of(view),
    )
    return local, derived


def min_islands_of(view: View) -> int | AllIslands:
    """Return with how many islands a run goes on; a number that is that of all is "all"."""
    value = view.value(MIN_ISLANDS_KEY)
    return "all" if value in ("all", view.integer("mesh.dp_replicate")) else cast(int, value)


COUNT_KEY, UPDATES_KEY = "servers.count", "servers.updates"
STALENESS_KEY, DAMPING_KEY = "servers.max_staleness", "servers.damping"


def read_updates(view: View) -> Updates:
    """Return when servers update."""
    return record(view, Updates, "servers")
