"""Bugs that would give garbage, or nothing at all, end the run: with rank, action and cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.proof.run import prove
from tests.parallel.pipeline.pipelines import pipeline_plan
from tests.proof.layouts import layout


@dataclass(frozen=True, slots=True)
class Ended:
    """Say of a bug that ends the run which rank says what: the action and the cause."""

    mutant: str
    rank: str
    says: str
    schedule: str = "1f1b"


GONE = "what it needs is not there: it was never made, or it was freed too early"
ENDED = (
    Ended("pipelines:w_before_its_b", "rank 0 (pp0)", f"W0.1: {GONE}", "zb-h1"),
    Ended("pipelines:w_left_out", "rank 0 (pp0)", "the weight gradients of B0.1", "zb-h1"),
    Ended("pipelines:input_freed_early", "rank 1 (pp1)", f"BW1.1: {GONE}"),
    Ended("pipelines:graph_freed_early", "rank 1 (pp1)", f"BW1.1: {GONE}"),
    Ended(
        "pipelines:memory_freed_early",
        "rank 1 (pp1)",
        "BW1.1: the memory of its input was given back too early",
    ),
    Ended("pipelines:graph_used_up", "rank 1 (pp1)", "BW1.1: Trying to backward through the graph"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ended", ENDED, ids=lambda ended: ended.mutant)
def test_a_bug_that_would_give_garbage_ends_the_run(ended: Ended, rank_pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failed:
        prove(
            layout(pp=2, schedule=ended.schedule),
            run_ranks=rank_pool.run,
            subject=f"tests.proof.mutants.{ended.mutant}",
            own_precision=False,
        )
    summary = str(failed.value).splitlines()[0]
    assert summary.startswith(f"error[rank-raised]: {ended.rank}: RuntimeError: ")
    assert ended.says in summary


@pytest.mark.quick("zb-h1-2")
@pytest.mark.parametrize(("schedule", "pp"), [("gpipe", 2), ("1f1b", 4), ("zb-h1", 2), ("zb-v", 4)])
def test_a_message_that_is_never_sent_ends_the_run(schedule: str, pp: int) -> None:
    # Ranks of their own: they are killed.
    with RankPool(pp) as pool, pytest.raises(RankFailure) as failed:
        prove(
            pipeline_plan(schedule, pp, dtype="fp32"),
            run_ranks=partial(pool.run, timeout_s=8.0),
            subject="tests.proof.mutants.pipelines:last_send_skipped",
            own_precision=False,
        )
    last = 2 * pp - 1
    summary = str(failed.value).splitlines()[0]
    # Of a pool the job is what times out, of a run the step.
    assert re.match(r"error\[(rank-stuck|job-timed-out)\]: rank 1 \(pp1\): ", summary)
    assert f"it waits in activation {last} stage 0 -> 1 from rank 0 at F1.{last}" in summary
