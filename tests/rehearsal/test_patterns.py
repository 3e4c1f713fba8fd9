"""Patterns of calls: each says when its communicator is made and used, and what is equal."""

from __future__ import annotations

import pytest

from echelon.rehearsal.order import SEND, Issue, RankLog
from echelon.rehearsal.patterns import MESSAGES, Pattern, patterns_of
from tests.rehearsal.test_planted import TIED, rehearsed


def issue(kind: str, *, data: str = "", task: str = "") -> Issue:
    return Issue(
        communicator="pair",
        members=(0, 1),
        kind=kind,
        num_bytes=8,
        dtype="float32",
        name="x",
        task=task,
        data=data,
    )


def pattern_of(kind: str, *, every_rank: bool = True) -> Pattern:
    logs = {(rank,): RankLog(rank) for rank in (0, 1)}
    for log in logs.values():
        log.made("other", (0, 1))
        log.made("pair", (0, 1))
        log.issue(issue(kind, data="gradients of w", task="F0.1"))
        log.issue(issue(kind))
    (pattern,) = patterns_of({by: log.entries for by, log in logs.items()}, every_rank=every_rank)
    return pattern


def test_a_collective_says_what_is_known_of_its_calls() -> None:
    pattern = pattern_of("all_reduce")
    assert (pattern.communicator, pattern.kind) == ("pair", "all_reduce")
    assert (pattern.num_calls, pattern.num_identified) == (4, 2)
    assert "make it as number 1. First used in F0.1" in pattern.no_hang
    assert "2 have the same parameters from the same element. 2 have the same name" in (
        pattern.no_mixing
    )


def test_elements_and_sizes_are_claimed_only_where_every_rank_was_rehearsed() -> None:
    assert "element" not in pattern_of("all_reduce", every_rank=False).no_mixing
    assert "as many bytes" in pattern_of("exchange").no_mixing
    assert "bytes" not in pattern_of("exchange", every_rank=False).no_mixing


def test_messages_are_one_pattern() -> None:
    pattern = pattern_of(SEND)
    assert pattern.kind == MESSAGES
    assert pattern.no_hang.endswith(
        "Both ends of a pair make its sends and receives in one order, and no wait leads back to "
        "itself."
    )


@pytest.mark.parametrize("flags", [TIED])
def test_a_rehearsal_has_a_pattern_for_every_communicator(flags: tuple[str, ...]) -> None:
    rehearsal = rehearsed(*flags)
    patterns = {(pattern.communicator, pattern.kind): pattern for pattern in rehearsal.patterns}
    names = {name.partition(".")[0] for name, _ in patterns}
    assert names == {"world", "dp", "tied", "pipe_forward", "pipe_backward"}
    assert sum(pattern.num_calls for pattern in rehearsal.patterns) == rehearsal.num_operations
    assert [pattern.to_json() for pattern in rehearsal.patterns] == rehearsal.to_json()["patterns"]
    # All but the opening of the group, and counts of tokens.
    reduced = next(pattern for (_, kind), pattern in patterns.items() if kind == "all_reduce")
    assert reduced.num_calls >= reduced.num_identified
    assert all("First used in the start" in pattern.no_hang for pattern in rehearsal.patterns)


def test_calls_that_do_not_fit_have_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.parallel.device_mesh import GroupMaker

    monkeypatch.setattr(GroupMaker, "open_all", lambda self: None)
    assert rehearsed(*TIED).patterns == ()
