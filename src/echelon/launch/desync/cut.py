# SPDX-License-Identifier: Apache-2.0
"""Say on which link nothing arrives, where all members have called an operation. No torch.

What connections say counts most: packets that the other end does not acknowledge. Where they say
nothing, as of transports that are no TCP, it is known of some operations for whose message a rank
waits, and of others it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from echelon.launch.desync.findings import Finding, Verdict
from echelon.launch.desync.fingerprint import Fingerprint, RankEvidence, partners
from echelon.launch.desync.links import common_end, cut_links, something_arrives


def cut_link(
    delivered: Sequence[int],
    waits: Mapping[int, Fingerprint],
    ranks: Sequence[RankEvidence],
    *,
    moving: bool,
) -> Verdict | None:
    """Return between whom nothing arrives that `delivered` wait for, whose members have all called.

    None where data still arrives, if `moving` counts: a slow link is no cut one.
    """
    seen = between(delivered, waits, ranks)
    if seen is not None:
        return seen
    if moving and something_arrives(ranks):
        return None
    return _by_waits(delivered, waits, {one.rank: one for one in ranks})


def between(
    concerned: Sequence[int], waits: Mapping[int, Fingerprint], ranks: Sequence[RankEvidence]
) -> Verdict | None:
    """Return the links of the ranks `concerned` that are seen to be cut; None where none is.

    A rank that is an end of all of them is odd; of one link both ends are named.
    """
    links = [one for one in cut_links(ranks) if {*one.ends} & {*concerned}]
    if not links:
        return None
    by_rank = {one.rank: one for one in ranks}
    shared = common_end(links)
    odd: tuple[int, ...] = links[0].ends
    others: tuple[int, ...] = ()
    if shared is not None:
        odd = (shared,)
        others = tuple(sorted({end for link in links for end in link.ends} - {shared}))
    wait = waits.get(odd[0])
    mates = [rank for rank in others if wait is not None and rank in partners(wait)]
    other = [*mates, *others, *odd[1:]][0]
    calls = [waits[rank] for rank in (odd[0], other, *concerned) if rank in waits]
    call = next((one for one in calls if {odd[0], other} <= {*partners(one)}), calls[0])
    its, theirs = (
        _same_call(by_rank.get(rank), call) or waits.get(rank) or _last(by_rank.get(rank))
        for rank in (odd[0], other)
    )
    return Verdict(
        finding=Finding.LINK, odd=odd, others=others, its=its, theirs=theirs, links=tuple(links)
    )


def _by_waits(
    delivered: Sequence[int],
    waits: Mapping[int, Fingerprint],
    by_rank: Mapping[int, RankEvidence],
) -> Verdict:
    """Return the rank for whose messages the most wait; all members where that is not known."""
    awaited = Counter[int]()
    for rank in delivered:
        one, call = by_rank[rank], waits[rank]
        ends = [end for end in call.ends or () if end != rank]
        awaited.update([one.awaits] if one.awaits is not None else ends)
    first, *rest = awaited.most_common(2) or [(None, 0)]
    if first[0] is not None and first[1] > 1 and not (rest and rest[0][1] == first[1]):
        odd = (first[0],)
        others = tuple(sorted(rank for rank in delivered if rank != first[0]))
    else:
        odd, others = tuple(sorted({*delivered, *awaited})), ()
    its = _same_call(by_rank.get(odd[0]), waits[delivered[0]])
    theirs = waits[others[0]] if others else _same_call(by_rank.get(odd[-1]), its)
    return Verdict(finding=Finding.LINK, odd=odd, others=others, its=its, theirs=theirs)


def _same_call(one: RankEvidence | None, call: Fingerprint | None) -> Fingerprint | None:
    """Return what a rank did for its part of an operation."""
    if one is None or call is None:
        return None
    here = (one for one in one.fingerprints if one.channel == call.channel)
    return next((one for one in here if one.sequence == call.sequence), None)


def _last(one: RankEvidence | None) -> Fingerprint | None:
    return None if one is None else one.last
