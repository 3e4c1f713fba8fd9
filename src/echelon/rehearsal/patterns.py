# SPDX-License-Identifier: Apache-2.0
"""Patterns of calls, and for each why no order of its ranks' progress can hang or mix data.

A pattern is one kind of call on the communicators of one name. The reasons follow from the logs,
which say the same whichever rank is fast or slow: nothing that a rank issues or waits for depends
on time.

no hang    Each call waits for fixed calls before it. Their graph has no circle (`order.py`), so
           while calls are left, all that one of them waits for has ended: it can run.
no mixing  The n-th calls of all members of a communicator are one operation, for the lists are
           fixed and NCCL keeps their order. These calls have equal data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.rehearsal.order import RECEIVE, SEND, Entry, Issue, Made, RankClass

MESSAGES = "messages"
"""The kind of sends and receives together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Reasons why one kind of call on communicators of one name neither hangs nor mixes data."""

    communicator: str
    """The name that each member has for it."""
    kind: str
    """A collective, or MESSAGES."""
    num_calls: int
    """Calls of the ranks that were rehearsed."""
    num_identified: int
    """Calls whose data is known by parameters and element, or by microbatch and stages."""
    no_hang: str
    """Why no order hangs."""
    no_mixing: str
    """Why no order mixes data."""

    def to_json(self) -> dict[str, object]:
        """Return the pattern as a JSON object."""
        return {
            "communicator": self.communicator,
            "kind": self.kind,
            "calls": self.num_calls,
            "identified": self.num_identified,
            "no_hang": self.no_hang,
            "no_mixing": self.no_mixing,
        }


def patterns_of(
    logs: Mapping[RankClass, Sequence[Entry]], *, every_rank: bool
) -> tuple[Pattern, ...]:
    """Return the patterns of logs that fit together (`prove_order` has no fault of them).

    `every_rank`: each rank of the run has its log, so that elements and parts were compared.
    """
    places: dict[str, int] = {}
    calls: dict[tuple[str, str], list[Issue]] = {}
    first_uses: dict[str, dict[str, None]] = {}
    for log in logs.values():
        number = 0
        for entry in log:
            if isinstance(entry, Made):
                places.setdefault(entry.communicator, number)
                number += 1
            elif isinstance(entry, Issue):
                kind = MESSAGES if entry.kind in (SEND, RECEIVE) else entry.kind
                calls.setdefault((entry.communicator, kind), []).append(entry)
                if entry.opens:
                    uses = first_uses.setdefault(entry.communicator, {})
                    uses[entry.task or "the start"] = None
    return tuple(
        Pattern(
            communicator=name,
            kind=kind,
            num_calls=len(issues),
            num_identified=(known := sum(bool(issue.data) for issue in issues)),
            no_hang=_opening(places.get(name), list(first_uses[name])) + _WAITS[kind == MESSAGES],
            no_mixing=_pairing(kind, issues, known, every_rank=every_rank),
        )
        for (name, kind), issues in calls.items()
    )


_WAITS = {
    False: " Every member makes these calls in one order, and no wait leads back to itself.",
    True: " Both ends of a pair make its sends and receives in one order, and no wait leads back "
    "to itself.",
}


def _opening(place: int | None, first_uses: Sequence[str]) -> str:
    """The places where the communicator is made and first used, in a sentence."""
    made = "" if place is None else f"All ranks make it as number {place}. "
    return f"{made}First used in {', '.join(first_uses)}, where hosts wait in no circle."


def _pairing(kind: str, issues: Sequence[Issue], identified: int, *, every_rank: bool) -> str:
    """The data that calls of one number have in common, in a sentence."""
    at = " from the same element" if every_rank else ""
    if kind == MESSAGES:
        return (
            "Calls of one number are one message. One end sends the data that the other computes "
            "on: payload, microbatch and stages."
        )
    if kind == "exchange":
        size = f"as many bytes, and the same known parameters{at}" if every_rank else "one name"
        return f"Calls of one number are one exchange: both ends of each message have {size}."
    named = len(issues) - identified
    ranges = f" {identified:,} have the same parameters{at}." if identified else ""
    names = f" {named:,} have the same name in the same action." if named else ""
    return f"Calls of one number have equal kind, bytes and dtype.{ranges}{names}"
