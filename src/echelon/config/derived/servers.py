# SPDX-License-Identifier: Apache-2.0
"""Settings of parameter servers: when they update, and what staleness costs."""

from __future__ import annotations

from typing import cast

from echelon.config.view import View
from echelon.core.choices.updates import AllWorkers, UpdateKind, Updates

COUNT_KEY, UPDATES_KEY = "servers.count", "servers.updates"
STALENESS_KEY, DAMPING_KEY = "servers.max_staleness", "servers.damping"
MIN_WORKERS_KEY, RESTARTS_KEY = "servers.min_workers", "servers.restarts"


def read_updates(view: View) -> Updates:
    """Return when servers update."""
    return Updates(
        kind=cast(UpdateKind, view.word(UPDATES_KEY)),
        max_staleness=view.integer(STALENESS_KEY),
        damping=view.number(DAMPING_KEY),
        min_workers=min_workers_of(view),
        restarts=view.integer(RESTARTS_KEY),
    )


def min_workers_of(view: View) -> int | AllWorkers:
    """Return with how many workers a run goes on; a number that is that of all is "all"."""
    value = view.value(MIN_WORKERS_KEY)
    return "all" if value in ("all", view.integer("mesh.dp_replicate")) else cast(int, value)
