"""Which links are cut, by what connections say at both ends."""

from __future__ import annotations

from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.links import common_end, cut_links, something_arrives


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
