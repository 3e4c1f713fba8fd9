"""Who is odd, from made-up fingerprints alone; and bugs of the decision that the table finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echelon.launch.desync import verdict
from echelon.launch.desync import verdict as kin
from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.findings import Finding, detail, summary
from echelon.launch.desync.fingerprint import Activity, Fingerprint, RankEvidence
from echelon.launch.desync.verdict import decide, find_mismatch, find_stall
from tests.launch.desync.cases import CASES, Case
from tests.launch.desync.programs import PAST, TWO_BY_TWO, one_group, run_of

CALL = "dp all_gather tokens 1 int64"


@pytest.mark.system("S55")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_odd_rank_and_both_operations_are_named(case: Case) -> None:
    assert case.wrong() == ""


def test_ranks_that_agree_are_not_judged() -> None:
    ranks = [run_of(rank, PAST, TWO_BY_TWO, Activity.RUNS) for rank in range(4)]
    assert decide(ranks) is None
    # One is a step ahead: that is no mistake.
    ahead = [run_of(0, [*PAST, *PAST], TWO_BY_TWO, Activity.RUNS), *ranks[1:]]
    assert find_mismatch(ahead) is None


def test_a_rank_that_just_began_to_wait_may_go_on() -> None:
    ranks = [
        run_of(rank, [*PAST, "dp all_gather tokens 1 int64"], one_group(3)) for rank in range(3)
    ]
    moving = [replace(ranks[0], waited_s=0.1), *ranks[1:]]
    assert find_stall(moving) is None
    assert find_stall(ranks) is not None
    assert find_stall(ranks, moving_s=12.0) is None


def test_of_several_mismatches_the_first_counts() -> None:
    groups = one_group(3)
    later = [*PAST, "tp all_reduce one 1 int8", "dp all_gather tokens 1 int64"]
    odd = [*PAST, "tp all_reduce two 1 int8", "dp all_gather tokens 4 int64"]
    found = decide([run_of(0, later, groups), run_of(1, odd, groups), run_of(2, later, groups)])
    assert found is not None
    assert (found.finding, found.odd) == (Finding.OPERATION, (1,))
    assert found.its is not None
    assert found.its.name == "two"


def test_a_device_has_come_no_further_than_its_first_unfinished_operation() -> None:
    # NCCL: rank 0 has issued both, and its device stands in the first; so has rank 1, the other
    # way round. Nobody's host waits in either, and every call was made.
    first, second = "tp all_reduce x 1 float32", "dp all_reduce y 1 float32"
    groups = one_group(2)
    zero = replace(run_of(0, [first, second], groups), waits_for=1, counts_until=1)
    one = replace(run_of(1, [second, first], groups), waits_for=1, counts_until=1)
    found = decide([zero, one])
    assert found is not None
    assert (found.finding, found.odd, found.judged) == (Finding.APART, (0, 1), False)
    hosts = [replace(each, counts_until=None) for each in (zero, one)]
    link = decide(hosts)
    assert link is not None
    assert link.finding is Finding.LINK


def test_of_a_pair_the_one_that_left_its_own_past_is_named_first() -> None:
    past = [*PAST, *PAST]
    wrong, right = "dp all_reduce tokens 1 int64", "dp all_gather tokens 1 int64"
    ranks = [run_of(rank, [*past, (right, wrong)[rank]], one_group(2)) for rank in (0, 1)]
    found = decide(ranks)
    assert found is not None
    assert (found.finding, found.odd, found.likely) == (Finding.OPERATION, (1, 0), True)
    assert found.its is not None
    assert found.its.kind == "all_reduce"
    assert not found.judged, "its own past is no witness"
    assert summary(found, ranks) == (
        "and rank 0 (r0) call different operations, all_reduce tokens and all_gather tokens, and "
        "most likely rank 1 is odd: it left what it did before"
    )
    assert "did something else here in each step before" in detail(found, ranks)
    # Where both wait for one another in different groups, too.
    apart = [
        run_of(0, [*past, right], one_group(2)),
        run_of(1, [*past, "world all_reduce log 1 float32"], one_group(2)),
    ]
    found = decide(apart)
    assert found is not None
    assert (found.finding, found.odd, found.likely) == (Finding.APART, (1, 0), True)


def test_what_time_may_mend_is_not_certain() -> None:
    by_name = {case.name: decide(case.ranks) for case in CASES}
    uncertain = {name for name, found in by_name.items() if found and not found.certain}
    assert {"rank 1 runs", "nothing comes from rank 2", "rank 0 unknown"} <= uncertain
    assert not uncertain & {"rank 1 returned", "rank 2 gone", "no past", "shape of rank 1 of 3"}


def _fewest(votes: Mapping[Any, Iterable[int]]) -> Any:
    """Return what the fewest ranks stand for."""
    return min(votes, key=lambda one: len(set(votes[one]))) if votes else None


def _off_by_one(one: RankEvidence) -> tuple[Fingerprint, ...]:
    found = one.fingerprints
    return tuple(replace(each, sequence=each.sequence + one.rank % 2) for each in found)


def _reached(one: RankEvidence, other: Fingerprint) -> bool:
    """Take a member that has called the operation before for one that has called this."""
    calls = [each for each in one.fingerprints if each.channel == other.channel]
    return any(each.sequence >= other.sequence - 1 for each in calls)


def majority_is_wrong(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdict, "most", _fewest)


def ties_go_to_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdict, "most", lambda votes: max(votes, key=lambda one: len(votes[one])))


def sequences_are_off_by_one(patch: pytest.MonkeyPatch) -> None:
    true = verdict.find_mismatch

    def shifted(ranks: Any) -> Any:
        return true([replace(one, fingerprints=_off_by_one(one)) for one in ranks])

    patch.setattr(verdict, "find_mismatch", shifted)


def a_call_before_counts_as_this_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankEvidence, "has_called", _reached)


def dtypes_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fingerprint, "content", property(lambda one: (one.kind, one.name, one.shape)))


def kin_do_not_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdict, "are_kin", lambda *_: False)


def any_rank_is_kin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kin, "COMMON_PAST", 0)


def nobody_leaves_a_program(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdict, "departure", lambda ranks: None)
    patch.setattr(verdict, "alone", lambda circle, ranks: None)


def the_first_waiting_rank_is_blamed(patch: pytest.MonkeyPatch) -> None:
    true = verdict.find_stall

    def blame(ranks: Any, moving_s: float = 0.3) -> Any:
        found = true(ranks, moving_s)
        return found and replace(found, odd=(found.others or found.odd)[:1])

    patch.setattr(verdict, "find_stall", blame)


BUGS = [
    majority_is_wrong,
    ties_go_to_the_first,
    sequences_are_off_by_one,
    a_call_before_counts_as_this_one,
    dtypes_are_not_compared,
    kin_do_not_vote,
    any_rank_is_kin,
    nobody_leaves_a_program,
    the_first_waiting_rank_is_blamed,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_the_decision_is_found_by_the_table(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert [case.name for case in CASES if case.wrong()]


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
