# SPDX-License-Identifier: Apache-2.0
"""What checkpoints ask of other ranks: to hear from all of them, and to fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from echelon.core.errors import EchelonError

T = TypeVar("T")


class ExchangeBroken(Exception):
    """Say that a rank was lost before it told what others wait for; never seen by users.

    It is the same exchange that breaks for all who are left.
    """


class ObjectCommunicator(Protocol):
    """The ranks of a run, as far as a checkpoint needs them: their `Group` is one.

    Rank `index` of `size`.
    """

    index: int
    size: int

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in rank order, on every rank, once all have called."""
        ...


class SingleRankCommunicator:
    """A run with one rank."""

    index = 0
    size = 1

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what this rank gave."""
        return [value]


def run_on_all_ranks(communicator: ObjectCommunicator, action: Callable[[], T]) -> list[T]:
    """Run `action` on each rank; return all results, or raise on every rank what any rank raised.

    A rank that raised alone would leave the others waiting for it until they time out.
    """
    result: T | None = None
    error: EchelonError | None = None
    try:
        result = action()
    except EchelonError as raised:
        error = raised
    outcomes: list[tuple[Any, EchelonError | None]] = communicator.gather_objects((result, error))
    errors = [raised for _, raised in outcomes if raised is not None]
    if errors:
        # As one error of the first one's kind; what several ranks met is said once.
        raise type(errors[0])(dict.fromkeys(one for error in errors for one in error.problems))
    return [value for value, _ in outcomes]
