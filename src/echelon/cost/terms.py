"""The rows of which predictions consist: what is sent, and what is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pool = Literal["device", "host", "nvme"]
"""Where bytes rest. On a machine without GPU "device" is main memory, counted apart from "host"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTerm:
    """Say what one kind of message adds to the bytes that a rank sends per step.

    `each` is what one round of it sends (a round may be one message per bucket), `count` how many
    rounds there are. `formula` is in the letters of the file that gives the term; `source` is where
    it comes from.
    """

    axis: str
    name: str
    count: int
    each: int
    formula: str
    source: str

    @property
    def bytes(self) -> int:
        """Return the bytes of all of them."""
        return self.count * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTerm:
    """Say how many bytes of one kind a rank holds in one pool; `padding` of them hold nothing."""

    name: str
    bytes: int
    formula: str
    pool: Pool = "device"
    padding: int = 0
