# SPDX-License-Identifier: Apache-2.0
"""Settings of parameter servers: when they update, and what staleness costs."""

from __future__ import annotations

from typing import cast

from echelon.config.view import View
from echelon.core.choices.updates import UpdateKind, Updates

COUNT_KEY, UPDATES_KEY = "servers.count", "servers.updates"
STALENESS_KEY, DAMPING_KEY = "servers.max_staleness", "servers.damping"


def read_updates(view: View) -> Updates:
    """Return when servers update."""
    return Updates(
        kind=cast(UpdateKind, view.word(UPDATES_KEY)),
        max_staleness=view.integer(STALENESS_KEY),
        damping=view.number(DAMPING_KEY),
    )
