"""Made-up programs of ranks: what each has called, as fingerprints, without a process.

A call is written ``group kind name shape dtype``, such as ``dp all_reduce grads 8 float32``, and a
message ``pipe send act 8 float32 >1`` (to rank 1) or ``pipe receive act 8 float32 <0``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.launch.desync.fingerprint import Activity, Fingerprint, RankEvidence

Groups = Mapping[str, Sequence[tuple[int, ...]]]
STEP = (
    "dp all_gather tokens 1 int64",
    "tp all_reduce row 8 float32",
    "dp all_reduce grads 9 float32",
)
"""The calls of a step."""
PAST = STEP * 4
"""Steps that all ranks have done alike."""
TWO_BY_TWO: Groups = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)], "world": [(0, 1, 2, 3)]}


def one_group(size: int) -> Groups:
    """Return groups of all ranks."""
    everyone = tuple(range(size))
    return {name: [everyone] for name in ("dp", "tp", "world")}


def run_of(
    rank: int, calls: Sequence[str], groups: Groups, activity: Activity = Activity.WAITS
) -> RankEvidence:
    """Return a rank that has made these calls, and is in the last one or does something else."""
    counts: dict[object, int] = {}
    found: list[Fingerprint] = []
    for number, call in enumerate(calls, 1):
        one = _fingerprint(rank, call, groups)
        counts[one.channel] = counts.get(one.channel, 0) + 1
        found.append(replace(one, number=number, sequence=counts[one.channel], ended=True))
    waits = activity is Activity.WAITS
    return RankEvidence(
        rank=rank,
        label=f"r{rank}",
        activity=activity,
        fingerprints=tuple(found),
        waits_for=len(found) if waits else None,
        waited_s=11.0 if waits else 0.0,
    )


def _fingerprint(rank: int, call: str, groups: Groups) -> Fingerprint:
    group, kind, name, shape, dtype, *peer = call.split()
    ranks = next(ranks for ranks in groups[group] if rank in ranks)
    ends = None
    if peer:
        other = int(peer[0][1:])
        ends = (rank, other) if peer[0][0] == ">" else (other, rank)
    return Fingerprint(
        number=0,
        group=group,
        axis=group,
        ranks=ranks,
        sequence=0,
        kind=kind,
        name=name,
        shape=tuple(map(int, shape.split("x"))),
        dtype=dtype,
        ends=ends,
        site=f"engine.py:{len(name)} in rank{rank}",
    )
