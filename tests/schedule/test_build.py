"""The builders: their lists, their closed forms, and what they refuse."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.schedule.build import (
    SCHEDULES,
    build_schedule,
    builder_of,
    schedule_problems,
)
from echelon.schedule.builders.builder import Builder


def _builder(name: str, p: int, m: int) -> Builder:
    kind = SCHEDULES[name]
    stages = kind.stages_for(p, kind.default_virtual_stages)
    return builder_of(name, num_stages=stages, num_ranks=p, num_microbatches=m)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_minimum_is_accepted_and_one_fewer_is_not(name: str) -> None:
    kind = SCHEDULES[name]
    for p in filter(kind.fits_ranks, (1, 2, 5, 6)):
        fewest = kind.minimum_microbatches(p)
        _builder(name, p, fewest)
        with pytest.raises(InfeasiblePlan) as caught:
            _builder(name, p, fewest - 1)
        assert caught.value.rules == ("schedule-needs-microbatches",)


def test_minimum_microbatches_of_each_schedule() -> None:
    assert {name: kind.minimum_microbatches(4) for name, kind in SCHEDULES.items()} == {
        "naive": 1,
        "gpipe": 1,
        "1f1b": 4,
        "interleaved-1f1b": 4,
        "breadth-first": 4,
        "zb-h1": 4,
        "zb-h2": 4,
        "zb-v": 4,
        "dualpipe": 8,
        "dualpipe-v": 8,
    }


def test_the_stages_on_a_rank_of_each_schedule() -> None:
    allowed = {
        name: tuple(virtual for virtual in range(5) if kind.fits_virtual_stages(virtual))
        for name, kind in SCHEDULES.items()
    }
    assert allowed == {
        **dict.fromkeys(("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "dualpipe"), (1,)),
        **dict.fromkeys(("interleaved-1f1b", "breadth-first"), (2, 3, 4)),
        **dict.fromkeys(("zb-v", "dualpipe-v"), (2,)),
    }


def test_too_few_microbatches_names_the_numbers_and_what_works() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        build_schedule("1f1b", num_stages=4, num_ranks=4, num_microbatches=2)
    (problem,) = caught.value.problems
    assert problem.rule == "schedule-needs-microbatches"
    assert "4 stages needs at least 4 microbatches, but a step has 2" in problem.message
    assert problem.suggestions == (
        "4 microbatches",
        "16 microbatches",
        "schedule = 'naive'",
        "schedule = 'gpipe'",
    )


@pytest.mark.parametrize(
    ("name", "stages", "says", "works"),
    [
        (
            "interleaved-1f1b",
            8,
            "8 stages on 4 ranks needs at least 4 microbatches, but a step has 3",
            ("4 microbatches", "16 microbatches"),
        ),
        (
            "zb-v",
            8,
            "8 stages on 4 ranks needs at least 4 microbatches",
            ("4 microbatches", "16 microbatches"),
        ),
        (
            "dualpipe",
            4,
            "4 stages needs at least 8 microbatches",
            ("8 microbatches", "32 microbatches", "schedule = 'naive'", "schedule = 'gpipe'"),
        ),
        (
            "dualpipe-v",
            8,
            "8 stages on 4 ranks needs at least 8 microbatches",
            ("8 microbatches", "32 microbatches"),
        ),
    ],
)
def test_too_few_microbatches_for_several_stages_on_a_rank(
    name: str, stages: int, says: str, works: tuple[str, ...]
) -> None:
    (problem,) = schedule_problems(name, num_stages=stages, num_ranks=4, num_microbatches=3)
    assert problem.rule == "schedule-needs-microbatches"
    assert says in problem.message
    assert problem.suggestions == works


def test_dualpipe_refuses_an_odd_number_of_microbatches() -> None:
    (problem,) = schedule_problems("dualpipe", num_stages=4, num_ranks=4, num_microbatches=13)
    assert problem.rule == "schedule-even-microbatches"
    assert "13 (13 % 2 = 1)" in problem.message
    assert problem.suggestions[:2] == ("12 microbatches", "14 microbatches")
    assert "schedule = 'zb-h1'" in problem.suggestions
    assert schedule_problems("dualpipe", num_stages=4, num_ranks=4, num_microbatches=12) == ()
    (problem,) = schedule_problems("dualpipe", num_stages=4, num_ranks=4, num_microbatches=9)
    assert problem.suggestions[:2] == ("8 microbatches", "10 microbatches")


@pytest.mark.parametrize(
    ("ranks", "works"), [(1, ("mesh.pp = 2",)), (5, ("mesh.pp = 4", "mesh.pp = 6"))]
)
def test_dualpipe_refuses_an_odd_number_of_ranks(ranks: int, works: tuple[str, ...]) -> None:
    (problem,) = schedule_problems(
        "dualpipe", num_stages=ranks, num_ranks=ranks, num_microbatches=20
    )
    assert problem.rule == "schedule-even-ranks"
    assert f"pp = {ranks} leaves rank {ranks // 2} alone ({ranks} % 2 = 1)" in problem.message
    assert problem.suggestions[: len(works)] == works
    assert "schedule = '1f1b'" in problem.suggestions


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule("1F1B", num_stages=1, num_ranks=1, num_microbatches=1)
    (problem,) = caught.value.problems
    assert problem.rule == "schedule-known"
    assert "did you mean '1f1b'?" in problem.message
    assert problem.suggestions[0] == "1f1b"
    assert sorted(problem.suggestions) == sorted(SCHEDULES)
    assert schedule_problems("zigzag", num_stages=1, num_ranks=1, num_microbatches=1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("num_stages", "num_ranks"), [(7, 2), (1, 2), (0, 0)])
def test_stages_that_the_schedule_cannot_place_are_refused(
    name: str, num_stages: int, num_ranks: int
) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        build_schedule(name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=8)
    assert caught.value.rules == ("schedule-stages-per-rank",)
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    assert f"{stages} for {num_ranks} ranks" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stages", "works"),
    [
        ("1f1b", 8, ["4 stages", "schedule = 'interleaved-1f1b'", "schedule = 'breadth-first'"]),
        (
            "interleaved-1f1b",
            4,
            ["8 stages (virtual_stages = 2)", "12 stages (virtual_stages = 3)"],
        ),
        (
            "interleaved-1f1b",
            9,
            ["8 stages (virtual_stages = 2)", "12 stages (virtual_stages = 3)"],
        ),
        ("breadth-first", 17, ["16 stages (virtual_stages = 4)", "20 stages (virtual_stages = 5)"]),
        ("zb-v", 12, ["8 stages (virtual_stages = 2)", "schedule = 'interleaved-1f1b'"]),
        ("dualpipe-v", 4, ["8 stages (virtual_stages = 2)", "schedule = 'naive'"]),
        ("dualpipe", 8, ["4 stages", "schedule = 'interleaved-1f1b'"]),
    ],
)
def test_wrong_virtual_stages_name_the_nearest_that_work(
    name: str, stages: int, works: list[str]
) -> None:
    (problem,) = schedule_problems(name, num_stages=stages, num_ranks=4, num_microbatches=8)
    assert problem.rule == "schedule-stages-per-rank"
    assert SCHEDULES[name].places in problem.message
    assert list(problem.suggestions[: len(works)]) == works


def test_all_problems_come_at_once() -> None:
    problems = schedule_problems("1f1b", num_stages=4, num_ranks=2, num_microbatches=1)
    assert [problem.rule for problem in problems] == [
        "schedule-stages-per-rank",
        "schedule-needs-microbatches",
    ]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_builder_names_its_paper(name: str) -> None:
    assert SCHEDULES[name].name == name
    assert "arXiv" in SCHEDULES[name].paper
