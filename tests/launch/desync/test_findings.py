"""What a verdict says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.findings import (
    Finding,
    Verdict,
    at_length,
    common_end,
    cut_links,
    detail,
    something_arrives,
    summary,
)
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.verdict import decide
from tests.launch.desync.cases import CASES
from tests.launch.desync.programs import PAST, one_group, run_of

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("finding", list(Finding))
def test_only_what_no_time_would_mend_is_certain(finding: Finding) -> None:
    verdict = Verdict(finding=finding, odd=(1,), others=(0,), its=None, theirs=None)
    assert verdict.certain == (finding not in (Finding.LATE, Finding.LINK, Finding.UNKNOWN))


def test_somebody_must_agree_for_a_rank_to_be_judged() -> None:
    pair = Verdict(finding=Finding.APART, odd=(0, 1), others=(), its=None, theirs=None)
    assert not pair.judged
    assert Verdict(finding=Finding.LATE, odd=(0,), others=(1,), its=None, theirs=None).judged


def stalled(local: str, peer: str, silent_s: float = 2.0) -> StalledConnection:
    """Return a connection of which the other end is silent."""
    return StalledConnection(local=local, peer=peer, packets=1, repeats=3, silent_s=silent_s)


def rank_of(rank: int, *stalls: StalledConnection, arriving: tuple[str, ...] = ()) -> RankEvidence:
    """Return a rank whose ends are at the address `a{rank}`."""
    ends = tuple(f"a{rank}:{port}" for port in range(3))
    return RankEvidence(
        rank=rank, connections=Connections(ends=ends, stalled=stalls, arriving=arriving)
    )


def test_both_ends_of_a_link_are_one_link() -> None:
    ranks = [
        rank_of(0),
        rank_of(1, stalled("a1:0", "a2:1", 2.0)),
        rank_of(2, stalled("a2:1", "a1:0", 3.0), stalled("a2:2", "elsewhere:9")),
    ]
    links = cut_links(ranks)
    assert [link.ends for link in links] == [(1, 2)]
    assert [(fact.rank, fact.others) for fact in links[0].facts] == [(2, (1,)), (1, (2,))]
    assert common_end(links) is None


def test_a_rank_at_the_end_of_all_links_is_cut_off() -> None:
    ranks = [
        rank_of(0, stalled("a0:0", "a2:0")),
        rank_of(1, stalled("a1:0", "a2:1", 5.0)),
        rank_of(2),
    ]
    links = cut_links(ranks)
    assert [link.ends for link in links] == [(1, 2), (0, 2)], "the longest silence first"
    assert common_end(links) == 2
    apart = [*ranks, rank_of(3, stalled("a3:0", "a1:2")), rank_of(4, stalled("a4:0", "a3:2"))]
    assert common_end(cut_links(apart)) is None


def test_an_end_that_nobody_tells_is_of_those_who_cannot_be_heard() -> None:
    here = rank_of(0, stalled("a0:0", "b:7"))
    lost = [RankEvidence(rank=rank, activity=Activity.UNKNOWN, host="b") for rank in (1, 2)]
    assert cut_links([here]) == []
    links = cut_links([here, *lost])
    assert [(link.ends, link.facts[0].others) for link in links] == [((0, 1), (1, 2))]
    elsewhere = RankEvidence(rank=3, activity=Activity.UNKNOWN, host="c")
    assert cut_links([here, *lost, elsewhere]) == [], "it may be of either host"


def test_data_from_another_rank_arrives() -> None:
    assert not something_arrives([rank_of(0), rank_of(1, arriving=("store:1",))])
    assert not something_arrives([rank_of(0), rank_of(1, arriving=("a1:2",))])
    assert something_arrives([rank_of(0), rank_of(1, arriving=("a0:2",))])


def said(name: str) -> str:
    """Return all that is said of a case of the table."""
    ranks = BY_NAME[name].ranks
    found = decide(ranks)
    assert found is not None
    return f"rank {found.odd[0]} (r{found.odd[0]}): {summary(found, ranks)}\n{detail(found, ranks)}"


def test_both_operations_and_lines_are_told() -> None:
    assert said("operation of rank 2 of 4").splitlines() == [
        "rank 2 (r2): calls all_reduce tokens, where ranks 0, 1, 3 call all_gather tokens",
        "  rank 2 (r2) all_reduce tokens of int64 [1], call 9 of ranks 0, 1, 2, 3 (dp), "
        "at engine.py:6 in rank2",
        "  ranks 0, 1, 3 all_gather tokens of int64 [1], call 9 of ranks 0, 1, 2, 3 (dp), "
        "at engine.py:6 in rank0",
        "  3 agree, 1 differ: the fewer are odd",
    ]


def test_of_two_nobody_is_odd() -> None:
    text = said("dtype of rank 1 of 2")
    assert text.startswith(
        "rank 0 (r0): and rank 1 (r1) call all_gather tokens with int64 and int32"
    )
    assert "nobody says which is odd" in text
    assert "nobody can be judged" in text


def test_kin_are_told() -> None:
    text = said("shape of rank 3 in pairs")
    assert "with the shape [24], and rank 2 (r2) with [8]" in text
    assert "ranks 0, 1, which made the same calls until then, went on with the latter" in text


def test_each_finding_has_words() -> None:
    starts = {case.finding: said(name).splitlines()[0] for name, case in BY_NAME.items()}
    assert len(starts) == 12
    assert all("{" not in text and "None" not in text for text in starts.values())


def test_a_rank_that_is_late_is_told_with_its_stack() -> None:
    groups = one_group(3)
    late = replace(
        run_of(2, PAST, groups, Activity.RUNS), place="train.py:3 (loop())", stack="  line one\n"
    )
    waits = [run_of(rank, [*PAST, "dp all_gather tokens 1 int64"], groups) for rank in (0, 1)]
    ranks = [*waits, late]
    found = decide(ranks)
    assert found is not None
    assert detail(found, ranks).splitlines()[-2:] == [
        "  it is at train.py:3 (loop())",
        "  line one",
    ]
    assert "line one" not in detail(found, ranks, stacks=False)


def test_a_message_has_its_ends_and_long_lists_are_cut() -> None:
    one = run_of(0, ["pipe send act 8 float32 >1"], {"pipe": [(0, 1)]}).fingerprints[0]
    assert at_length(one) == (
        "send act of float32 [8], message 1 from rank 0 to 1 (pipe), at engine.py:3 in rank0"
    )
    many = replace(one, ends=None, ranks=tuple(range(64)))
    assert "of ranks 0, 1, 2, 3, 4, 5, 6 and 57 more" in at_length(many)
