"""The table of verdicts: what ranks have called and do, and who is odd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echelon.launch.desync.findings import Finding, Verdict
from echelon.launch.desync.fingerprint import Activity, RankEvidence
from echelon.launch.desync.verdict import decide
from tests.launch.desync.programs import PAST, STEP, TWO_BY_TWO, one_group, run_of

RIGHT = "dp all_gather tokens 1 int64"
NEXT = "tp all_reduce row 8 float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold what is known of ranks, and what must be said."""

    name: str
    ranks: Sequence[RankEvidence]
    finding: Finding
    odd: tuple[int, ...]
    judged: bool = True
    its: str = ""
    theirs: str = ""

    def wrong(self) -> str:
        """Return what a verdict of now gets wrong; "" where it is right."""
        found = decide(self.ranks)
        if found is None:
            return "nothing was found"
        expected = (self.finding, self.odd, self.judged)
        if (found.finding, found.odd, found.judged) != expected:
            return f"{found.finding} of {found.odd}, judged: {found.judged}"
        told = (_told(found, "its"), _told(found, "theirs"))
        wrong = any(
            want and want != have for want, have in zip((self.its, self.theirs), told, strict=True)
        )
        return f"operations {told}" if wrong else ""


def _told(verdict: Verdict, which: str) -> str:
    one = getattr(verdict, which)
    return "" if one is None else f"{one.kind} {one.name}"


WRONG_CALLS = {
    Finding.OPERATION: "dp all_reduce tokens 1 int64",
    Finding.SHAPE: "dp all_gather tokens 2 int64",
    Finding.DTYPE: "dp all_gather tokens 1 int32",
}


def in_one_group() -> Iterator[Case]:
    """Yield a call that differs on each rank of groups of three to five, and of both of a pair."""
    for size in (2, 3, 4, 5):
        groups = one_group(size)
        for odd in range(size):
            for finding, call in WRONG_CALLS.items():
                calls = [call if rank == odd else RIGHT for rank in range(size)]
                ranks = [run_of(rank, [*PAST, calls[rank]], groups) for rank in range(size)]
                pair = size == 2
                yield Case(
                    name=f"{finding} of rank {odd} of {size}",
                    ranks=ranks,
                    finding=finding,
                    odd=(0, 1) if pair else (odd,),
                    judged=not pair,
                    its="" if pair else " ".join(call.split()[1:3]),
                    theirs="" if pair else "all_gather tokens",
                )


def out_of_order() -> Iterator[Case]:
    """Yield a rank that is ahead of others in what all call, and one that calls once more."""
    groups = one_group(3)
    first, second = "dp all_reduce a 1 float32", "dp all_reduce b 1 float32"
    past = (first, second) * 5
    waits = [run_of(rank, [*past, first], groups) for rank in (0, 1)]
    yield Case(
        name="the next call first",
        ranks=[*waits, run_of(2, [*past, second], groups)],
        finding=Finding.ORDER,
        odd=(2,),
        its="all_reduce b",
        theirs="all_reduce a",
    )
    more = "dp all_reduce more 3 float32"
    yield Case(
        name="one more, and then on",
        ranks=[*waits, run_of(2, [*past, more, first], groups)],
        finding=Finding.EXTRA,
        odd=(2,),
        its="all_reduce more",
        theirs="all_reduce a",
    )
    yield Case(
        name="the same call twice",
        ranks=[
            *(run_of(rank, [*PAST, *STEP[:2], STEP[2]], one_group(3)) for rank in (0, 1)),
            run_of(2, [*PAST, *STEP[:1], *STEP[:1]], one_group(3)),
        ],
        finding=Finding.ORDER,
        odd=(2,),
        its="all_gather tokens",
        theirs="all_reduce grads",
    )


def in_pairs() -> Iterator[Case]:
    """Yield a rank of four in pairs: the other pair says who of its own is odd."""
    for odd in range(4):
        call = "tp all_reduce row 24 float32"
        ranks = [
            run_of(rank, [*PAST, RIGHT, call if rank == odd else NEXT], TWO_BY_TWO)
            for rank in range(4)
        ]
        yield Case(
            name=f"shape of rank {odd} in pairs",
            ranks=ranks,
            finding=Finding.SHAPE,
            odd=(odd,),
            its="all_reduce row",
            theirs="all_reduce row",
        )
    # Rank 3 skips the sum of its pair: nothing differs in any group, but ranks wait in a circle.
    done, norm = [*PAST, *STEP], "world all_gather norm 4 float32"
    yield Case(
        name="a call of a pair is skipped",
        ranks=[
            run_of(0, done, TWO_BY_TWO),
            run_of(1, [*done, norm], TWO_BY_TWO),
            run_of(2, [*PAST, *STEP[:2]], TWO_BY_TWO),
            run_of(3, [*PAST, STEP[0], STEP[2], norm], TWO_BY_TWO),
        ],
        finding=Finding.OPERATION,
        odd=(3,),
        its="all_reduce grads",
        theirs="all_reduce row",
    )


def absent() -> Iterator[Case]:
    """Yield a rank that no longer comes, in each way, at each place."""
    groups = one_group(4)
    ways = {
        Activity.RUNS: Finding.LATE,
        Activity.RETURNED: Finding.RETURNED,
        Activity.RAISED: Finding.RAISED,
        Activity.GONE: Finding.GONE,
        Activity.UNKNOWN: Finding.UNKNOWN,
    }
    for activity, finding in ways.items():
        for odd in range(4):
            ranks = [
                run_of(rank, PAST, groups, activity)
                if rank == odd
                else run_of(rank, [*PAST, RIGHT], groups)
                for rank in range(4)
            ]
            yield Case(
                name=f"rank {odd} {activity}",
                ranks=ranks,
                finding=finding,
                odd=(odd,),
                its="all_reduce grads",
                theirs="all_gather tokens",
            )
    # Rank 0 waits for rank 1, which waits for rank 2, which computes.
    chain = {"a": [(0, 1), (2, 3)], "b": [(1, 2), (0, 3)]}
    yield Case(
        name="the end of a chain",
        ranks=[
            run_of(0, ["a all_reduce x 1 float32"], chain),
            run_of(1, ["b all_reduce y 1 float32"], chain),
            run_of(2, [], chain, Activity.RUNS),
            run_of(3, [], chain, Activity.RUNS),
        ],
        finding=Finding.LATE,
        odd=(2,),
        theirs="all_reduce y",
    )


def circles() -> Iterator[Case]:
    """Yield a call that only one rank makes, while the others wait for it in another group."""
    for size in (2, 3, 4):
        groups = one_group(size)
        for odd in range(size):
            ranks = [
                run_of(rank, [*PAST, "world all_reduce log 1 float32"], groups)
                if rank == odd
                else run_of(rank, [*PAST, RIGHT], groups)
                for rank in range(size)
            ]
            pair = size == 2
            yield Case(
                name=f"only rank {odd} of {size} calls",
                ranks=ranks,
                finding=Finding.APART if size < 3 else Finding.OPERATION,
                odd=(0, 1) if pair else (odd,),
                judged=not pair,
                its="" if pair else "all_reduce log",
                theirs="" if pair else "all_gather tokens",
            )
    # The start of a run has no past by which to judge: the call in which most wait is right.
    groups = one_group(4)
    yield Case(
        name="no past",
        ranks=[
            run_of(rank, ["world all_reduce log 1 float32" if rank == 1 else RIGHT], groups)
            for rank in range(4)
        ],
        finding=Finding.APART,
        odd=(1,),
        its="all_reduce log",
        theirs="all_gather tokens",
    )


def pipelines() -> Iterator[Case]:
    """Yield messages: of two pipelines one says who is odd in the other; of one, nobody does."""
    pipes = {"pipe": [(0, 2), (1, 3)], "dp": [(0, 1), (2, 3)]}
    step = {
        True: ["pipe send act0 8 float32 >{}", "pipe send act1 8 float32 >{}"],
        False: ["pipe receive act0 8 float32 <{}", "pipe receive act1 8 float32 <{}"],
    }

    def calls(rank: int, count: int) -> list[str]:
        first = rank < 2
        return [one.format(rank + 2 if first else rank - 2) for one in step[first]] * count

    wrong = [*calls(3, 5)[:-2], "pipe receive act1 8 float32 <1"]
    ranks = [run_of(rank, calls(rank, 5), pipes) for rank in range(3)]
    yield Case(
        name="a message is skipped, beside another pipeline",
        ranks=[*ranks, run_of(3, wrong, pipes)],
        finding=Finding.ORDER,
        odd=(3,),
        its="receive act1",
        theirs="send act0",
    )
    yield Case(
        name="a message is skipped, in the only pipeline",
        ranks=[ranks[1], run_of(3, wrong, pipes)],
        finding=Finding.OPERATION,
        odd=(1, 3),
        judged=False,
    )


def links() -> Iterator[Case]:
    """Yield operations that all have called and that do not end."""
    groups = one_group(4)
    all_wait = [run_of(rank, [*PAST, RIGHT], groups) for rank in range(4)]
    for odd in range(4):
        ranks = [replace(one, awaits=odd if one.rank != odd else (odd + 1) % 4) for one in all_wait]
        yield Case(
            name=f"nothing comes from rank {odd}",
            ranks=ranks,
            finding=Finding.LINK,
            odd=(odd,),
            its="all_gather tokens",
            theirs="all_gather tokens",
        )
    yield Case(
        name="nobody knows whose messages are missing",
        ranks=all_wait,
        finding=Finding.LINK,
        odd=(0, 1, 2, 3),
        judged=False,
    )


CASES = [
    *in_one_group(),
    *out_of_order(),
    *in_pairs(),
    *absent(),
    *circles(),
    *pipelines(),
    *links(),
]
