# SPDX-License-Identifier: Apache-2.0
"""Find the links that are cut, by what connections say at both of their ends. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.launch.desync.connections import StalledConnection
from echelon.launch.desync.fingerprint import Activity, RankEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Unacknowledged:
    """Say that `rank` has sent what `others` have not acknowledged."""

    rank: int
    others: tuple[int, ...]
    """The rank at the other end; several where only one of their host can be meant."""
    connection: StalledConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLink:
    """Name the two ends of a link on which nothing arrives, and what shows it."""

    ends: tuple[int, int]
    """The two ranks, in order."""
    facts: tuple[Unacknowledged, ...]
    """At least one, of either end; the longest silence first."""


def cut_links(ranks: Sequence[RankEvidence]) -> list[CutLink]:
    """Return the links between ranks on which nothing is acknowledged, the most silent first.

    Whose end a peer is, ranks say themselves. An end that no rank has told belongs to those that
    cannot be heard, if there are any, and they are of one host.
    """
    owners = {end: one.rank for one in ranks if one.connections for end in one.connections.ends}
    unheard = [one for one in ranks if one.activity is Activity.UNKNOWN and one.connections is None]
    lost = tuple(one.rank for one in unheard) if len({one.host for one in unheard}) == 1 else ()
    found: dict[tuple[int, int], list[Unacknowledged]] = defaultdict(list)
    for one in ranks:
        for connection in () if one.connections is None else one.connections.stalled:
            owner = owners.get(connection.peer)
            others = lost if owner is None else (owner,)
            if not others or one.rank in others:
                continue
            fact = Unacknowledged(rank=one.rank, others=others, connection=connection)
            low, high = sorted((one.rank, others[0]))
            found[low, high].append(fact)
    links = [
        CutLink(ends=ends, facts=tuple(sorted(facts, key=_silence)))
        for ends, facts in found.items()
    ]
    return sorted(links, key=lambda link: (_silence(link.facts[0]), link.ends))


def something_arrives(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether a rank has just got data from another: a link may be slow, and carry yet."""
    ends = {one.rank: {*one.connections.ends} for one in ranks if one.connections}
    return any(
        peer in theirs
        for one in ranks
        if one.connections
        for peer in one.connections.arriving
        for rank, theirs in ends.items()
        if rank != one.rank
    )


def common_end(links: Sequence[CutLink]) -> int | None:
    """Return the rank that is an end of all of several links; None where there is none."""
    if len(links) < 2:
        return None
    shared = set(links[0].ends).intersection(*(link.ends for link in links[1:]))
    return shared.pop() if len(shared) == 1 else None


def _silence(fact: Unacknowledged) -> float:
    return -fact.connection.silent_s
