"""Ten mistakes on real ranks of every layout: the rank, both operations and both lines are named.

Each run trains on four CPU ranks (or two), one of which goes wrong in its fourth step. A few cases
run by default, all of them in `make test-all`.
"""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, RunOutcome, run_ranks
from tests.launch.desync.planted import Mistake, plan_for

AFTER_S = 1.0
STUCK_S = 6.0
TARGET = "tests.launch.desync.planted:train_wrongly"
GROUPS = {
    "dp": ("data", 2, 1),
    "zero3": ("shard", 1, 2),
    "tp": ("tensor", 2, 1),
    "tp-dp": ("tensor", 3, 1),
    "pp": ("pipe_forward", 2, 0),
    "pp-dp": ("pipe_forward", 3, 0),
    "cp": ("ring", 2, 1),
    "ep": ("expert", 1, 1),
}
"""By layout the group whose call goes wrong, the rank, and which of its calls in a step."""

BY_GROUP = ("operation", "order", "shape", "dtype", "missing", "extra", "cut")
BY_RANK = ("return", "exception", "loop")
ANY_SIZES = ("cp", "ep")
"""Their groups exchange tensors of any sizes: no shape or dtype of one must be that of another."""
TOLD_AS_NOTE = ("loop", "cut")
"""What time may mend, as far as anyone knows: it is told at once, and ends at the step timeout."""
QUICK = {("dp", "operation"), ("tp-dp", "shape"), ("pp-dp", "missing"), ("dp", "loop")}


def train(layout: str, mistake: Mistake | None, **more: object) -> RunOutcome:
    """Return how a run ends."""
    plan = plan_for(layout)
    world = plan.mesh.world_size
    return run_ranks(
        TARGET,
        {"layout": layout, "mistake": None if mistake is None else asdict(mistake), **more},
        world_size=world,
        labels=[f"{layout}{rank}" for rank in range(world)],
        options=LaunchOptions(limits=Limits(step_s=STUCK_S, desync_s=AFTER_S), shown_rank=None),
    )


def cases() -> list[pytest.param]:  # type: ignore[valid-type]
    """Return every mistake in every layout in which it can be made."""
    found = []
    for layout in GROUPS:
        for case in (*BY_GROUP, *BY_RANK):
            if case in ("shape", "dtype") and layout in ANY_SIZES:
                continue
            marks = () if (layout, case) in QUICK else (pytest.mark.slow,)
            found.append(pytest.param(layout, case, id=f"{layout}-{case}", marks=marks))
    return found


def told_of(layout: str, case: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said of a mistake: its error, or the note before it."""
    group, rank, place = GROUPS[layout]
    mistake = Mistake(case=case, rank=rank, group="" if case in BY_RANK else group, place=place)
    failure = train(layout, mistake).failure
    assert failure is not None
    said = capsys.readouterr().err
    if case in TOLD_AS_NOTE:
        return said[said.index("note: ") :]
    return str(failure)


@pytest.mark.system("S55")
@pytest.mark.parametrize(("layout", "case"), cases())
def test_a_mistake_is_named(layout: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of(layout, case, capsys)
    first = told.splitlines()[0]
    odd = GROUPS[layout][1]
    name = f"rank {odd} ({layout}{odd})"
    both = re.search(r": and (rank|ranks) .*", first)
    if both is None:
        assert re.match(rf"(error\[[a-z-]+\]|note): {re.escape(name)}:", first), told
    else:
        # Nobody can judge a pair, nor whose messages are missing in a sum of Gloo's own.
        assert (layout, case) in UNJUDGED, told
        assert re.search(rf"\brank {odd}\b|\b{odd}\b", first), told
    calls = [line for line in told.splitlines() if re.search(r"(call|message) \d+ (of|from)", line)]
    assert len(calls) == 2, told
    for line in calls:
        assert re.search(r", at \S+\.py:\d+ in \w+", line), told
    if case == "exception":
        assert "ValueError: the planted error" in told
    if case == "loop":
        assert "in endless_loop" in told


UNJUDGED = {
    ("dp", "cut"),
    ("tp", "cut"),
    ("tp-dp", "cut"),
    ("pp-dp", "cut"),
    ("pp", "cut"),
    *(("pp", case) for case in ("operation", "order", "shape", "dtype", "missing", "extra")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", GROUPS)
def test_a_run_without_a_mistake_is_left_alone(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(layout, None, steps=60)
    assert outcome.require() == ("ended",) * len(outcome.results)
    assert "note: " not in capsys.readouterr().err


def test_with_two_ranks_both_are_named_and_nobody_is_judged() -> None:
    failure = train("dp-pair", Mistake(case="operation", rank=1, group="data")).failure
    assert failure is not None
    told = str(failure)
    assert "error[collectives-meet]: rank 0 (dp-pair0): and rank 1 (dp-pair1) call " in told
    assert "nobody says which is odd" in told.splitlines()[0]
    assert "as many ranks do the one as the other: nobody can be judged" in told
    assert len(re.findall(r", at \S+\.py:\d+ in \w+", told)) == 2
