"""What is said of a verdict."""

from __future__ import annotations

from dataclasses import replace

from echelon.launch.desync.fingerprint import Activity
from echelon.launch.desync.verdict import decide
from echelon.launch.desync.wording import at_length, detail, summary
from tests.launch.desync.cases import CASES
from tests.launch.desync.programs import PAST, one_group, run_of

BY_NAME = {case.name: case for case in CASES}


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
