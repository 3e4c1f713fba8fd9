"""Ten mistakes on real ranks of every layout: the rank, both operations and both lines are named.

Each run trains on four CPU ranks (or two), one of which goes wrong in its sixth step. A few cases
run by default, all of them in `make test-all`.
"""

from __future__ import annotations

import re

import pytest

from echelon.launch.local.supervisor import RunOutcome
from tests.launch.desync.planted import Mistake
from tests.launch.desync.table import CASES, GROUPS, TOLD_AS_NOTE, can_be, mistake_of
from tests.launch.desync.table import train as train_with

AFTER_S = 1.0
QUICK = {("dp", "operation"), ("tp-dp", "shape"), ("pp-dp", "missing"), ("dp", "loop")}
MORE = [("dp", "native"), ("dp", "silent"), ("cp", "silent")]
"""A loop that holds the interpreter, and a link of which the system tells nothing."""


def train(layout: str, mistake: Mistake | None, **more: object) -> RunOutcome:
    """Return how a run ends.

    Only what is told as a note has a short step timeout: on a busy machine a good step may be long.
    """
    is_note = mistake is not None and mistake.case in TOLD_AS_NOTE
    step_s = 9.0 if is_note else 120.0
    return train_with(layout, mistake, after_s=AFTER_S, step_s=step_s, folder=None, **more)


def cases() -> list[pytest.param]:  # type: ignore[valid-type]
    """Return every mistake in every layout in which it can be made."""
    found = []
    for layout, case in [*((layout, case) for layout in GROUPS for case in CASES), *MORE]:
        if can_be(layout, case):
            marks = () if (layout, case) in QUICK else (pytest.mark.slow,)
            found.append(pytest.param(layout, case, id=f"{layout}-{case}", marks=marks))
    return found


def told_of(layout: str, case: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said of a mistake: its error, or the note before it."""
    failure = train(layout, mistake_of(layout, case)).failure
    assert failure is not None
    said = capsys.readouterr().err
    if case in TOLD_AS_NOTE:
        note = said[said.index("note: ") :]
        assert "no error yet: the run goes on until a step has taken 9 s" in note
        ends_as = "link-carries" if case in ("cut", "silent") else "rank-stuck"
        assert f"error[{ends_as}]" in str(failure)
        return note.partition("no error yet")[0]
    return str(failure)


@pytest.mark.one_in(4)
@pytest.mark.system("S55")
@pytest.mark.parametrize(("layout", "case"), cases())
def test_a_mistake_is_named(layout: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of(layout, case, capsys)
    first = told.splitlines()[0]
    odd = GROUPS[layout][1]
    name = f"rank {odd} ({layout}{odd})"
    if case == "silent" and layout != "cp":
        # Whose message is missing in a sum of Gloo's own nobody knows.
        assert re.search(rf": and ranks .*\b{odd}\b", first), told
    elif case != "cut" or not re.search(rf": and {re.escape(name)} do not reach each other", first):
        # Of a link that is cut, either end may say so first.
        assert re.match(rf"(error\[[a-z-]+\]|note): {re.escape(name)}:", first), told
    if re.search(r": and (rank|ranks) .*", first) and case != "silent":
        # Nobody judges a pair, but for its own past; one link has two ends.
        link = case == "cut" and "do not reach each other" in first
        assert link or f"most likely rank {odd} is odd" in first, told
    calls = [line for line in told.splitlines() if re.search(r"(call|message) \d+ (of|from)", line)]
    assert len(calls) == 2, told
    for line in calls:
        assert re.search(r", at \S+\.py:\d+ in \w+", line), told
    if case == "exception":
        assert "ValueError: the planted error" in told
    if case == "loop":
        assert re.search(r"is not waiting: it is at planted.py:\d+ \(.*\), and has not come", first)
        assert "in endless_loop" in told
    if case == "native":
        assert "in native_loop" in told
    if case == "cut":
        assert re.search(r"has sent \d+ packets? to rank \d+ .* and heard nothing for", told)


@pytest.mark.slow
@pytest.mark.parametrize("layout", GROUPS)
def test_a_run_without_a_mistake_is_left_alone(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(layout, None, steps=60)
    assert outcome.require() == ("ended",) * len(outcome.results)
    assert "note: " not in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_told_and_the_run_ends_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = train("dp", Mistake(case="slow", rank=2, group=""), steps=8)
    assert outcome.require() == ("ended",) * 4
    said = capsys.readouterr().err
    assert said.startswith("note: rank 2 (dp2): is not waiting: it is at planted.py:")
    assert said.count("note: ") == 1
    assert "error" not in said.replace("no error yet", "")


def test_with_two_ranks_both_are_named_and_nobody_is_judged() -> None:
    failure = train("dp-pair", mistake_of("dp-pair", "operation")).failure
    assert failure is not None
    told = str(failure)
    assert "error[collectives-meet]: rank 1 (dp-pair1): and rank 0 (dp-pair0) call " in told
    assert "most likely rank 1 is odd: it left what it did before" in told.splitlines()[0]
    assert "as many ranks do the one as the other, but rank 1 did something else here" in told
    assert len(re.findall(r", at \S+\.py:\d+ in \w+", told)) == 2
