# SPDX-License-Identifier: Apache-2.0
"""The part of `echelon plan` about islands of local SGD that may be lost."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.cli.plan.servers import count_text
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.local_sgd import outer_bytes, rejoin_bytes


def island_lines(plan: Plan) -> Iterator[str]:
    """Yield what becomes of lost islands, and what a meeting without one and a return take.

    Nothing where the first that is lost ends the run.
    """
    local = plan.mathematics.local_sgd
    if not local.is_elastic:
        return
    times = count_text(local.restarts, "time")
    again = f"each is started again up to {times}" if local.restarts else "none is started again"
    ends = local.every - 1
    fewer = sum(one.bytes for one in outer_bytes(plan, 0, ends, present=local.islands - 1))
    back = f", {decimal_bytes(rejoin_bytes(plan, 0))} to one that comes back" * (local.restarts > 0)
    yield (
        f"islands  goes on with {local.min_islands} of {local.islands} islands, {again}; rank 0 "
        f"sends {decimal_bytes(fewer)} where one is missing at the end of a round{back}"
    )
