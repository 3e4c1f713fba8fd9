# SPDX-License-Identifier: Apache-2.0
"""Seconds that a plan waits for positions and for experts: of one block and microbatch on a rank.

What `exchanges.py` charges a block for, taken apart: what ranks compute meanwhile, how long rows
are on their way, and what of that no work hides. `echelon explain context` and `echelon explain
experts` compare by these numbers the ways that a run could take.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.block import attention_seconds, routed_matmuls
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.links.exchanges import ExchangeSeconds, context_exchange, expert_exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSeconds:
    """Give the seconds of transfers (hidden or not), of those that show, and of computing."""

    transfer_s: float
    exposed_s: float
    compute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of computing with what is waited for."""
        return self.compute_s + self.exposed_s


def context_seconds(plan: Plan) -> ExposedSeconds | None:
    """Return the seconds of attention over context ranks; None where a link is not known."""
    if not _has_link(plan, plan.mesh.groups(Axis.CP)[0]):
        return None
    work = cost_inputs_from_plan(plan)
    forward, backward = attention_seconds(work)
    moved = context_exchange(work, forward, backward)
    return _exposed(moved, first_number(forward + backward))


def dispatch_seconds(plan: Plan) -> ExposedSeconds | None:
    """Return the seconds of a block's rows; None where none travel, or a link is not known."""
    if plan.model.experts is None or plan.mesh.ep == 1:
        return None
    if not _has_link(plan, plan.mesh.expert_groups(expert_tp=plan.layout.experts.expert_tp)[0]):
        return None
    work = cost_inputs_from_plan(plan)
    return _exposed(expert_exchange(work, routed_matmuls(work)))


def _exposed(moved: ExchangeSeconds, compute_s: float = 0.0) -> ExposedSeconds:
    return ExposedSeconds(
        transfer_s=first_number(moved.forward + moved.backward),
        exposed_s=first_number(moved.shown_forward + moved.shown_backward),
        compute_s=compute_s,
    )


def _has_link(plan: Plan, ranks: tuple[int, ...]) -> bool:
    """Return whether a link of the cluster joins these ranks."""
    links = plan.cluster.links
    return len(ranks) < 2 or any(len({r // link.degree for r in ranks}) == 1 for link in links)
