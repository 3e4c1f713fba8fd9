"""Seconds of tokens on their way to experts: what travels, and what of it is waited for.

Of one block with experts and one microbatch on one rank, with a balanced load and links at their
peaks. Rows to the members of an expert group go over the link that joins the two; links of several
tiers run side by side, and each takes alpha + bytes / beta. Two hops follow one another. Sizes that
are told first cost one alpha more, and each chunk costs all alphas again.

A device computes while rows travel: first what every token meets (shared experts), and in chunks
the rows of the chunk before. Chunk i + 1 leaves before the outputs of chunk i, over one link. What
is waited for is the time until the last outputs are back, less all that was computed. In backward
it is the same with the gradients of inputs; those of weights, which also run while rows travel
where a schedule does not put them off, are not taken off.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from echelon.core.cluster import Link
from echelon.core.plan import Plan
from echelon.cost.expert_dispatch import dispatch_bytes
from echelon.cost.expert_load import num_nodes
from echelon.cost.stage import RankPart, StagePart
from echelon.cost.terms import SentTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class TravelSeconds:
    """Give the seconds of rows on their way to experts (`there`) and back, all chunks together."""

    there_s: float
    back_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSeconds:
    """Give the seconds of both ways in both passes; None of them is what is waited for."""

    forward: TravelSeconds
    backward: TravelSeconds


def dispatch_seconds(plan: Plan) -> DispatchSeconds | None:
    """Return the seconds of a block with experts; None where nothing travels, or no link is known.

    It is those of the first rank.
    """
    experts, layout = plan.model.experts, plan.layout.experts
    if experts is None or plan.mesh.ep == 1:
        return None
    layer = experts.first_dense_layers
    one = StagePart(stage=0, blocks=(layer,), first=False, last=False, microbatches=1)
    part = RankPart(pp_rank=0, stages=(one,), mirrored=False)
    sent: defaultdict[tuple[str, str], int] = defaultdict(int)
    for term in dispatch_bytes(plan, part, None):
        if not term.name.endswith("again"):
            sent[term.axis, _motion(term)] += term.each
    ways = {motion: 0.0 for motion in _MOTIONS}
    for axis, members in _groups(plan).items():
        for motion in ways:
            seconds = _seconds(plan, members, sent[axis, motion], layout.chunks)
            if seconds is None:
                return None
            ways[motion] += seconds
        if not layout.padded:
            told = _seconds(plan, members, 0, layout.chunks)
            ways["dispatch forward"] += told or 0.0
    return DispatchSeconds(
        forward=TravelSeconds(there_s=ways["dispatch forward"], back_s=ways["combine forward"]),
        backward=TravelSeconds(there_s=ways["combine backward"], back_s=ways["dispatch backward"]),
    )


def waited_s(travel: TravelSeconds, *, work_s: float, beside_s: float, chunks: int) -> float:
    """Return what is waited for while experts take `work_s`, and all others `beside_s`."""
    there, back, work = travel.there_s / chunks, travel.back_s / chunks, work_s / chunks
    arrived, link, device = there, there, beside_s
    for chunk in range(chunks):
        device = max(device, arrived) + work
        if chunk + 1 < chunks:
            arrived = link = link + there
        link = max(link, device) + back
    return max(link, device) - work_s - beside_s


_MOTIONS = ("dispatch forward", "combine forward", "combine backward", "dispatch backward")


def _motion(term: SentTerm) -> str:
    """Return with which motion a term goes: counts and choices leave before the first rows."""
    return term.name if term.name in _MOTIONS else "dispatch forward"


def _groups(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the ranks that the first one exchanges rows with, itself first, by axis."""
    group = plan.mesh.expert_groups(expert_tp=plan.layout.experts.expert_tp)[0]
    if plan.layout.experts.dispatch == "flat":
        return {"ep": group}
    size = len(group) // num_nodes(plan)
    return {"ep_across": group[::size], "ep_within": group[:size]}


def _seconds(plan: Plan, members: tuple[int, ...], num_bytes: int, chunks: int) -> float | None:
    """Return the seconds of an exchange of equal parts; None where a link is not known."""
    first, others = members[0], members[1:]
    shares: defaultdict[Link, float] = defaultdict(float)
    for other in others:
        link = _link(plan, first, other)
        if link is None:
            return None
        shares[link] += num_bytes / len(others)
    tiers = (chunks * link.latency_s + share / link.bandwidth for link, share in shares.items())
    return max(tiers, default=0.0)


def _link(plan: Plan, first: int, second: int) -> Link | None:
    links = plan.cluster.links
    return next((one for one in links if first // one.degree == second // one.degree), None)
