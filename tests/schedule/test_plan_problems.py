"""A plan that was changed in Python is refused before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import InfeasiblePlan
from echelon.core.plan import Plan
from echelon.schedule.build import build_schedule
from echelon.schedule.from_plan import pipeline_problems, stage_placement_from_plan
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.pipeline.pipelines import EVERY, pipeline_plan

ROWS = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1")
STUCK = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")


def two_ranks(**changes: Any) -> Plan:
    """Return a plan of two ranks, two stages and two microbatches with rows."""
    plan = plan_of(pp=2, schedule="file", rows=ROWS)
    return replace(
        plan,
        layout=replace(plan.layout, pipeline=replace(plan.layout.pipeline, **changes)),
    )


REFUSED = {
    "a word that is no action": (
        {"rows": ("F0.0 F0.1 D0.0 BW0.1", ROWS[1])},
        "schedule-action-known",
        "rank 0, place 2: 'D0.0' is not an action",
    ),
    "rows that wait for each other": (
        {"rows": STUCK},
        "schedule-cannot-deadlock",
        "rank 0 cannot start BW0.0",
    ),
    "a row that lacks an action": (
        {"rows": ("F0.0 F0.1 BW0.0", ROWS[1])},
        "schedule-covers-once",
        "stage 0, microbatch 1",
    ),
    "rows beside a builder": (
        {"schedule": "1f1b"},
        "rows-fit-plan",
        "the schedule is '1f1b', which a builder makes, but the plan has rows for 2 ranks",
    ),
    "a file without rows": ({"rows": ()}, "rows-fit-plan", "0 ranks, but the plan has 2"),
    "rows of a third rank": (
        {"rows": (*ROWS, "F1.1")},
        "rows-fit-plan",
        "3 ranks, but the plan has 2",
    ),
    "a stage that is far away": (
        {"rows": ("F0.0 F0.1 BW0.0 BW999999999999.1", ROWS[1])},
        "rows-fit-plan",
        "1000000000000 stages, but the plan has 2",
    ),
    "a microbatch too many": (
        {"rows": (f"{ROWS[0]} F0.2 BW0.2", f"{ROWS[1]} F1.2 BW1.2")},
        "rows-fit-plan",
        "3 microbatches, but the plan has 2",
    ),
    "a schedule that nobody knows": (
        {"schedule": "mine"},
        "schedule-known",
        "'mine' is not a schedule",
    ),
    "numbers that the builder does not take": (
        {"schedule": "zb-v", "rows": ()},
        "schedule-stages-per-rank",
        "2 stages for 2 ranks",
    ),
    "too few microbatches for the builder": (
        {"schedule": "dualpipe", "rows": ()},
        "schedule-needs-microbatches",
        "a step has 2",
    ),
    "a block in no stage": (
        {"stages": ((0, 1), (3,))},
        "stages-cover-layers",
        "blocks 2 are in no stage",
    ),
    "more stages on a rank than there are": (
        {"virtual_stages": 2},
        "stages-match-mesh",
        "lists 2 stages, but pp x virtual_stages = 2 x 2 = 4",
    ),
}


@pytest.mark.parametrize("start", [ec.prove, ec.train], ids=["prove", "train"])
@pytest.mark.parametrize(("changes", "rule", "text"), REFUSED.values(), ids=list(REFUSED))
def test_a_plan_that_cannot_run_is_refused_before_any_rank(
    start: Callable[[Plan], object],
    changes: dict[str, Any],
    rule: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InfeasiblePlan) as caught:
        start(two_ranks(**changes))
    assert set(caught.value.rules) == {rule}
    assert text in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_that_can_run_are_proven() -> None:
    plan = two_ranks()
    assert pipeline_problems(plan) == []
    assert ec.prove(plan).proven


def test_everything_is_told_at_once_with_where_it_was_set() -> None:
    job = load_job("nano", ["mesh.pp=2", "pipeline.schedule=gpipe"])
    pipeline = replace(job.plan.layout.pipeline, stages=((0, 1), (2,)), schedule="gpip")
    plan = replace(job.plan, layout=replace(job.plan.layout, pipeline=pipeline))
    with pytest.raises(InfeasiblePlan) as caught:
        require_trainable(plan, job.sources)
    assert caught.value.rules == ("stages-cover-layers", "schedule-known")
    assert caught.value.problems[1].set_by == "--set pipeline.schedule=gpipe"


@pytest.mark.parametrize("name", EVERY)
def test_every_schedule_passes(name: str) -> None:
    assert pipeline_problems(pipeline_plan(name, 2)) == []
    assert pipeline_problems(pipeline_plan(name, 4)) == []


def _crossing(placement: tuple[int, ...]) -> tuple[str, ...]:
    """Return rows in which microbatch 1 crosses four ranks the other way round."""
    rows: list[list[str]] = [[] for _ in placement]
    for microbatch in (0, 1):
        for kind, stages in (("F", range(4)), ("BW", range(3, -1, -1))):
            for stage in stages:
                rank = placement[stage] if microbatch == 0 else 3 - placement[stage]
                rows[rank].append(f"{kind}{stage}.{microbatch}")
    return tuple(map(" ".join, rows))


def crossing_plan(placement: tuple[int, ...], *, tied: bool) -> Plan:
    """Return a plan of four ranks in which microbatch 1 crosses the other way round."""
    model = replace(QWEN, tied=tied)
    return plan_of(model=model, pp=4, schedule="file", rows=_crossing(placement))


def test_a_tied_embedding_is_on_two_ranks_at_most() -> None:
    assert pipeline_problems(crossing_plan((0, 1, 2, 3), tied=True)) == []
    assert pipeline_problems(crossing_plan((0, 2, 3, 1), tied=False)) == []
    plan = crossing_plan((0, 2, 3, 1), tied=True)
    with pytest.raises(InfeasiblePlan, match="tied-ends-mirrored") as caught:
        ec.prove(plan)
    with pytest.raises(InfeasiblePlan, match="tied-ends-mirrored"):
        ec.train(plan)
    (problem,) = caught.value.problems
    assert problem.message == (
        "the embedding is tied, and 1 of 2 microbatches cross the ranks the other way round: the "
        "first stage is on ranks 0 and 3 and the last on ranks 1 and 2, so that 4 ranks would hold "
        "the embedding"
    )
    assert problem.suggestions == ("model.tied = false", "the last stage on ranks 0 and 3")


@pytest.mark.slow
def test_both_ends_on_one_rank_and_its_mirror_image_are_proven() -> None:
    # Stages 0 and 3 are on rank 0, and on rank 1 for microbatch 1.
    words = {
        (rank, microbatch): [
            f"{kind}{stage}.{microbatch}"
            for kind, stages in (("F", (0, 1, 2, 3)), ("BW", (3, 2, 1, 0)))
            for stage in stages
            if (stage in (0, 3)) == (rank == microbatch)
        ]
        for rank in (0, 1)
        for microbatch in (0, 1)
    }
    both = tuple(" ".join([*words[rank, 0], *words[rank, 1]]) for rank in (0, 1))
    plan = plan_of(model=QWEN, pp=2, schedule="file", virtual_stages=2, rows=both)
    assert pipeline_problems(plan) == []
    assert ec.prove(plan).proven


def test_dualpipe_written_out_may_have_a_tied_embedding() -> None:
    plan = pipeline_plan("dualpipe", 4)
    built = build_schedule(
        "dualpipe", num_stages=4, num_ranks=4, num_microbatches=plan.num_microbatches
    )
    rows = tuple(" ".join(map(str, row)) for row in built.actions)
    pipeline = replace(plan.layout.pipeline, schedule="file", rows=rows)
    tied = replace(plan.mathematics, model=replace(plan.model, tied=True))
    written = replace(plan, mathematics=tied, layout=replace(plan.layout, pipeline=pipeline))
    assert pipeline_problems(written) == []


@pytest.mark.slow
def test_a_file_may_put_three_stages_on_one_rank_and_one_on_another(tmp_path: Path) -> None:
    words = [
        f"{kind}{stage}.{microbatch}"
        for microbatch in range(4)
        for kind, stages in (("F", range(4)), ("BW", range(3, -1, -1)))
        for stage in stages
    ]
    rows = [",".join(word for word in words if ("2." in word) == bool(rank)) for rank in (0, 1)]
    path = tmp_path / "uneven.csv"
    path.write_text("\n".join(rows))
    sets = ["mesh.pp=2", "batch.microbatch_sequences=4", "pipeline.schedule=file"]
    plan = ec.plan("nano", settings=[*sets, f"pipeline.file={path}"])
    assert plan.layout.pipeline.virtual_stages == 2
    assert stage_placement_from_plan(plan).stage_ranks == (0, 0, 1, 0)
    assert ec.prove(plan).proven
