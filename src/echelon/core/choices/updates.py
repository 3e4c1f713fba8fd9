# SPDX-License-Identifier: Apache-2.0
"""How parameter servers update: all workers at once, or each by itself, with a bound and damping.

A worker's clock counts the steps that it has done. Asynchronous servers apply the gradient of each
worker as it comes. A version counts updates, and the staleness of a gradient is the number of
updates between the version that it was computed from and the one that it is applied to. A worker
begins a step only while it is at most `max_staleness` steps ahead of the slowest: stale synchronous
parallel (Ho et al., 2013). With a bound of 0 no gradient may meet another version than its own, so
those of one step are applied together: that is the synchronous update, bit for bit. The learning
rate falls with the staleness (Zhang et al., Staleness-aware Async-SGD, 2016, divide by it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from echelon.core.settings.configured import Configured
from echelon.core.settings.value_types import Integer, Real

UpdateKind = Literal["synchronous", "asynchronous"]

DEFAULT_MAX_STALENESS = 2
"""Steps that a worker may be ahead of the slowest, where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Say when servers apply gradients, how far workers may part, and what staleness costs."""

    kind: Annotated[
        UpdateKind,
        Configured("asynchronous: each worker's gradient is applied as it comes", name="updates"),
    ] = "synchronous"
    max_staleness: Annotated[
        int,
        Configured(
            "asynchronous: steps that a worker may be ahead of the slowest; 0: as synchronous",
            Integer(minimum=0, maximum=10_000),
        ),
    ] = DEFAULT_MAX_STALENESS
    damping: Annotated[
        float,
        Configured(
            "asynchronous: the learning rate is divided by (1 + staleness) to this power",
            Real(maximum=10.0),
        ),
    ] = 0.0

    @property
    def is_asynchronous(self) -> bool:
        """Return whether workers do not wait for one another in every step."""
        return self.kind == "asynchronous"

    @property
    def applies_each(self) -> bool:
        """Return whether each worker's gradient is an update of its own."""
        return self.is_asynchronous and self.max_staleness > 0

    def per_clock(self, num_workers: int) -> int:
        """Return how many updates there are when every worker has done a step."""
        return num_workers if self.applies_each else 1

    def most_stale(self, num_workers: int) -> int:
        """Return the largest staleness that the bound s allows: (W - 1) (2 s + 1).

        While a worker computes step c, the slowest other one may go on from c - s, and none begins
        a step beyond c + s: each other worker ends at most 2 s + 1 of them.
        """
        return (num_workers - 1) * (2 * self.max_staleness + 1) if self.applies_each else 0

    def damped_rate(self, rate: float, staleness: int) -> float:
        """Return the learning rate of a gradient: rate / (1 + staleness)^damping."""
        return rate / (1.0 + staleness) ** self.damping


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedGradient:
    """Say that a server applied a gradient: whose, of which step, read from and applied to what."""

    worker: int
    """Whose it was."""
    step: int
    """Of which of its steps, from 0."""
    read: int
    """The version that it was computed from."""
    version: int
    """The version that it was applied to: of several in one update, the same."""

    @property
    def staleness(self) -> int:
        """Return the updates between."""
        return self.version - self.read

    @property
    def event_name(self) -> str:
        """Return what its event is called."""
        return f"worker {self.worker} step {self.step + 1} read {self.read} applied {self.version}"

    @classmethod
    def from_event(cls, name: str) -> AppliedGradient | None:
        """Return the gradient of an event of this name; None where it is no such name."""
        found = _EVENT_NAME.fullmatch(name)
        if found is None:
            return None
        worker, step, read, version = map(int, found.groups())
        return cls(worker=worker, step=step - 1, read=read, version=version)


_EVENT_NAME = re.compile(r"worker (\d+) step (\d+) read (\d+) applied (\d+)", re.ASCII)
