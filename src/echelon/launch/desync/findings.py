# SPDX-License-Identifier: Apache-2.0
"""What can be found to be wrong among ranks, and whom it is laid to. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from echelon.launch.desync.fingerprint import Fingerprint
from echelon.launch.desync.links import CutLink


class Finding(StrEnum):
    """Name what is wrong."""

    OPERATION = "operation"
    ORDER = "order"
    EXTRA = "extra"
    SHAPE = "shape"
    DTYPE = "dtype"
    APART = "apart"
    RETURNED = "returned"
    RAISED = "raised"
    GONE = "gone"
    UNKNOWN = "unknown"
    LATE = "late"
    LINK = "link"


UNCERTAIN = frozenset({Finding.LATE, Finding.LINK, Finding.UNKNOWN})
"""What time may mend: a rank that still computes, a link that is slow, a rank that is not heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Say who is odd, and which two operations do not meet."""

    finding: Finding
    """What is wrong."""
    odd: tuple[int, ...]
    """The ranks that are odd; all that differ, where none can be judged."""
    others: tuple[int, ...]
    """The ranks that agree with each other; () where none can be judged."""
    its: Fingerprint | None
    """What the first odd rank called, or called last."""
    theirs: Fingerprint | None
    """What the others called, or wait in."""
    kin: tuple[int, ...] = ()
    """Ranks of other groups by which it was judged, where the members are as many on each side."""
    likely: bool = False
    """Whether nobody is judged, and only the first of `odd` left what it did itself before."""
    links: tuple[CutLink, ...] = ()
    """The links that are seen to carry nothing."""

    @property
    def certain(self) -> bool:
        """Return whether no time would mend it."""
        return self.finding not in UNCERTAIN

    @property
    def judged(self) -> bool:
        """Return whether a majority says who is odd."""
        return bool(self.others)
