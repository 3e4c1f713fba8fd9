"""What a rank writes down: the first call of members opens them."""

from __future__ import annotations

from echelon.rehearsal.order import HostRead, Issue, RankLog, Wait


def issue(communicator: str, members: tuple[int, ...]) -> Issue:
    return Issue(
        communicator=communicator,
        members=members,
        kind="all_reduce",
        num_bytes=8,
        dtype="float32",
        name="x",
    )


def test_the_first_call_of_members_opens_them() -> None:
    log = RankLog(0)
    for name, members in (("a", (0, 1)), ("a", (0, 1)), ("b", (0, 1)), ("a", (0, 2))):
        log.wait(log.issue(issue(name, members)))
    issues = [one for one in log.entries if isinstance(one, Issue)]
    assert [one.opens for one in issues] == [True, False, True, True]
    assert [one.issue for one in log.entries if isinstance(one, Wait)] == [0, 2, 4, 6]


def test_a_read_of_the_host_is_an_entry_with_its_place() -> None:
    log = RankLog(3)
    log.host_read("item", "models/batch.py:1", "F")
    assert log.entries == [HostRead(operation="item", where="models/batch.py:1", task="F")]
