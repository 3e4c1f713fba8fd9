"""Seconds of attention over context ranks: what is computed, what travels, and what is waited for.

Of one block and one microbatch, forward and backward, on the rank that takes longest, with links
and devices at their peaks. On a ring the keys of the next step travel while this one is at work,
and in backward gradients too: of each step only max(0, transfer - work) is waited for (Liu et al.,
"Ring Attention", 2023, section 3.1). A gather, its sum, and the exchanges of heads have nothing of
attention to hide behind: all of them is waited for. A message of n bytes takes alpha + n / beta on
the slowest link between the ranks of its group, and a gather or its sum over n ranks n - 1 alphas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from echelon.core.axis import Axis
from echelon.core.cluster import Link
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.context import GRADIENT_LEAST_BYTES, context_bytes, kv_row_elements, routes_of
from echelon.cost.context_routes import Hop, num_rows
from echelon.cost.context_work import meetings, scores_by_rank
from echelon.cost.flops import attention_width
from echelon.cost.stage import RankPart, StagePart
from echelon.cost.unit_times import flops_rate

BACKWARD_PRODUCTS = 2.5
"""Five products of attention backward, two forward (Dao, FlashAttention-2, 2023, section 2.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Give what a context rank sends for one block and microbatch."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSeconds:
    """Give the seconds of the slowest rank; `transfer_s` is all that travels, hidden or not."""

    work_s: float
    transfer_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of attention with what is waited for."""
        return self.work_s + self.exposed_s


def block_bytes(plan: Plan, cp_rank: int) -> BlockBytes:
    """Return the bytes that a context rank sends for one block and microbatch."""
    one = StagePart(stage=0, blocks=(0,), first=False, last=False, microbatches=1)
    part = RankPart(pp_rank=0, stages=(one,), mirrored=False)
    terms = [term for term in context_bytes(plan, part, cp_rank) if "again" not in term.name]
    forward = sum(term.each for term in terms if term.name.endswith("forward"))
    return BlockBytes(forward=forward, backward=sum(term.each for term in terms) - forward)


def attention_seconds(plan: Plan) -> AttentionSeconds | None:
    """Return the seconds of attention on its slowest rank; None where a link is not known."""
    u, ranks = plan.layout.context.ulysses_degree, plan.mesh.groups(Axis.CP)[0]
    work = _work_s(plan, max(scores_by_rank(plan)))
    ring, ulysses = _link(plan, ranks[::u]), _link(plan, ranks[:u])
    if (ring is None and len(ranks) > u) or (ulysses is None and u > 1):
        return None
    whole = exposed = 0.0
    if u > 1 and ulysses is not None:
        exchanged = _exchange_bytes(plan)
        whole += exchanged / ulysses.bandwidth + 4 * ulysses.latency_s
        exposed = whole
    if len(ranks) > u and ring is not None:
        moved, waited = _over_ring(plan, ring)
        whole, exposed = whole + moved, exposed + waited
    return AttentionSeconds(work_s=work, transfer_s=whole, exposed_s=exposed)


def _exchange_bytes(plan: Plan) -> int:
    one = StagePart(stage=0, blocks=(0,), first=False, last=False, microbatches=1)
    part = RankPart(pp_rank=0, stages=(one,), mirrored=False)
    terms = [term for term in context_bytes(plan, part, 0) if term.name.startswith("heads")]
    return sum(term.each for term in terms if "again" not in term.name)


def _over_ring(plan: Plan, link: Link) -> tuple[float, float]:
    """Return the seconds of transfers of the place that waits longest, and those that it waits."""
    places = [_of_place(plan, place, link) for place in range(plan.placement.ring_degree)]
    return max(places, key=lambda pair: pair[1])


def _of_place(plan: Plan, place: int, link: Link) -> tuple[float, float]:
    n, row = plan.placement.ring_degree, kv_row_elements(plan)
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    routes, gathered = routes_of(plan), plan.layout.context.kind == "gathered"
    wide = max(GRADIENT_LEAST_BYTES, size)
    if gathered:
        link = replace(link, latency_s=(n - 1) * link.latency_s)
    keys = _by_step(routes.keys, place, row * size)
    gradients = _by_step(routes.gradients, place, row * wide)
    work: defaultdict[int, float] = defaultdict(float)
    heads = plan.model.heads // plan.mesh.tp // plan.layout.context.ulysses_degree
    for meeting in meetings(plan.placement, plan.model.mask, gathered=gathered):
        if meeting.place == place:
            pairs = meeting.pairs * plan.layout.microbatch_sequences
            work[meeting.step] += _work_s(plan, pairs * heads) / (1 + BACKWARD_PRODUCTS)
    moved = waited = 0.0
    for step in range(n + 1):
        coming = _seconds(keys.get(step + 1, 0), link)
        leaving = _seconds(gradients.get(step, 0), link)
        # Half of the own block is left for the end of backward (`context_work.halfway`).
        half = {0: 0.5 * work[0], n: 0.5 * work[0]}
        behind = 0.0 if gathered else BACKWARD_PRODUCTS * half.get(step, work[step])
        moved += 2 * coming + leaving
        waited += max(0.0, coming - (0.0 if gathered else work[step]))
        waited += max(0.0, coming + leaving - behind)
    return moved, waited


def _by_step(hops: Iterable[Hop], place: int, row_bytes: int) -> dict[int, int]:
    """Return the bytes that a place sends, or gets if that is more, at each step."""
    sent: defaultdict[int, int] = defaultdict(int)
    got: defaultdict[int, int] = defaultdict(int)
    for hop in hops:
        if hop.source == place:
            sent[hop.step] += num_rows(hop.rows) * row_bytes
        if hop.target == place:
            got[hop.step] += num_rows(hop.rows) * row_bytes
    return {step: max(sent[step], got[step]) for step in {*sent, *got}}


def _seconds(num_bytes: int, link: Link) -> float:
    return link.latency_s + num_bytes / link.bandwidth if num_bytes else 0.0


def _work_s(plan: Plan, scores: int) -> float:
    """Return the seconds of forward and backward of so many scores, at the peak of a device."""
    head_dim = attention_width(plan.model) / plan.model.heads
    return 4.0 * scores * head_dim * (1 + BACKWARD_PRODUCTS) / flops_rate(plan)


def _link(plan: Plan, ranks: tuple[int, ...]) -> Link | None:
    """Return the slowest link between ranks; None where it is not known, or there is one rank."""
    if len(ranks) < 2:
        return None
    links = plan.cluster.links
    return next((link for link in links if len({r // link.degree for r in ranks}) == 1), None)
