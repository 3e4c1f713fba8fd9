"""A link on which nothing arrives: its ends, what shows it, and what is no cut link."""

from __future__ import annotations

from dataclasses import replace

from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.findings import Finding
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.verdict import decide, find_stall
from echelon.launch.desync.wording import detail, summary
from tests.launch.desync.programs import PAST, TWO_BY_TWO, one_group, run_of

CALL = "dp all_gather tokens 1 int64"


def told(ranks: list[RankEvidence], **ends: str) -> list[RankEvidence]:
    """Return ranks with connections; ``r2="r1"`` is silent towards rank 2."""
    found: list[RankEvidence] = []
    for one in ranks:
        stalls = [
            StalledConnection(
                local=f"h{one.rank}:1", peer=f"h{peer}:1", packets=2, repeats=4, silent_s=3.0
            )
            for peer in ends.get(f"r{one.rank}", "")
        ]
        known = Connections(ends=(f"h{one.rank}:1",), stalled=tuple(stalls))
        found.append(replace(one, connections=known, host=f"node{one.rank}"))
    return found


def waiting(size: int) -> list[RankEvidence]:
    """Return ranks that all wait in one operation."""
    return [run_of(rank, [*PAST, CALL], one_group(size)) for rank in range(size)]


def test_the_ends_of_one_link_are_named_with_what_they_sent() -> None:
    ranks = told(waiting(4), r1="2", r2="1")
    found = decide(ranks)
    assert found is not None
    assert (found.finding, found.odd, found.judged) == (Finding.LINK, (1, 2), False)
    assert summary(found, ranks) == (
        "and rank 2 (r2) do not reach each other: what is sent between them in all_gather tokens "
        "is not acknowledged"
    )
    lines = detail(found, ranks).splitlines()
    assert lines[0].startswith("  rank 1 (r1) all_gather tokens of int64 [1], call 9 of ranks 0, 1")
    assert lines[1].startswith("  rank 2 (r2) all_gather tokens of int64 [1], call 9 of ranks 0, 1")
    assert lines[2:] == [
        "  rank 1 (r1) on node1 has sent 2 packets to rank 2 (r2) on node2 and again 4 times, "
        "from h1:1 to h2:1, and heard nothing for 3.0 s",
        "  rank 2 (r2) on node2 has sent 2 packets to rank 1 (r1) on node1 and again 4 times, "
        "from h2:1 to h1:1, and heard nothing for 3.0 s",
    ]


def test_a_rank_that_reaches_nobody_is_the_odd_one() -> None:
    ranks = told(waiting(4), r1="2", r3="2", r0="2")
    found = decide(ranks)
    assert found is not None
    assert (found.odd, found.others) == ((2,), (0, 1, 3))
    assert summary(found, ranks).startswith("is cut off from ranks 0, 1, 3: what is sent between")
    assert detail(found, ranks).count("call 9 of ranks 0, 1, 2, 3") == 2


def test_only_ranks_in_the_operation_are_told_to_be_in_it() -> None:
    done = [*PAST, CALL, "tp all_reduce row 8 float32"]
    ranks = told([run_of(rank, done, TWO_BY_TWO) for rank in range(4)], r1="3", r2="3")
    found = decide(ranks)
    assert found is not None
    assert (found.odd, found.others) == ((3,), (1, 2))
    second = detail(found, ranks).splitlines()[1]
    assert second.startswith("  rank 2 (r2) all_reduce row of float32 [8], call 5 of ranks 2, 3")


def test_a_late_rank_is_no_cut_link() -> None:
    ranks = [*waiting(3)[:2], run_of(2, PAST, one_group(3), Activity.RUNS)]
    found = decide(told(ranks, r0="2"))
    assert found is not None
    assert (found.finding, found.odd) == (Finding.LATE, (2,))


def test_a_rank_that_is_not_heard_is_behind_a_cut_link() -> None:
    unheard = RankEvidence(rank=2, label="r2", activity=Activity.UNKNOWN, host="node2")
    ranks = [*told(waiting(3)[:2], r0="2"), unheard]
    found = decide(ranks)
    assert found is not None
    assert (found.finding, found.odd, found.certain) == (Finding.LINK, (0, 2), False)
    assert "do not reach each other: what is sent between them in all_gather" in summary(
        found, ranks
    )
    found = decide([*told(waiting(3)[:2]), unheard])
    assert found is not None
    assert found.finding is Finding.UNKNOWN


def test_where_data_arrives_a_link_is_slow_and_not_cut() -> None:
    ranks = told(waiting(2))
    known = ranks[0].connections
    assert known is not None
    slow = [replace(ranks[0], connections=replace(known, arriving=("h1:1",))), ranks[1]]
    assert find_stall(slow) is None
    late = find_stall(slow, moving_s=0.0)
    assert late is not None, "when the time is up it is the best that is known"
    assert late.finding is Finding.LINK
    cut = find_stall(ranks)
    assert cut is not None
    assert (cut.finding, cut.odd) == (Finding.LINK, (0, 1))
