"""What checkpoints ask of other ranks: to hear from all of them, and to fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from echelon.core.errors import EchelonError, Problem

T = TypeVar("T")


class Exchange(Protocol):
    """The ranks of a run, as far as a checkpoint needs them."""

    @property
    def rank(self) -> int:
        """Return which rank this is."""
        ...

    @property
    def world_size(self) -> int:
        """Return how many ranks there are."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in rank order, on every rank, once all have called."""
        ...


class OneRank:
    """The exchange of a run with one rank."""

    rank = 0
    world_size = 1

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what this rank gave."""
        return [value]


def everywhere(exchange: Exchange, action: Callable[[], T]) -> list[T]:
    """Run `action` on each rank; return all results, or raise on every rank what any rank raised.

    A rank that raised alone would leave the others waiting for it until they time out.
    """
    result: T | None = None
    error: EchelonError | None = None
    try:
        result = action()
    except EchelonError as raised:
        error = raised
    outcomes: list[tuple[Any, EchelonError | None]] = exchange.gather_objects((result, error))
    raise_together([raised for _, raised in outcomes if raised is not None])
    return [value for value, _ in outcomes]


def raise_together(errors: list[EchelonError]) -> None:
    """Raise the problems of all `errors` as one error of the first one's kind, each said once."""
    if errors:
        problems: dict[Problem, None] = {}
        for error in errors:
            problems.update(dict.fromkeys(error.problems))
        raise type(errors[0])(problems)
