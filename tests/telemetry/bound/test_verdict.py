"""What binds a run: a sleep that is planted anywhere flips the verdict to where it is (S46)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.observe import summary_text
from echelon.core.serialize import to_json
from echelon.cost.seconds.unit_times import memory_bound_seconds
from echelon.launch.local.supervisor import RankPool
from echelon.telemetry.bound import Bound, read_bound
from echelon.telemetry.run_directory import create_run
from echelon.telemetry.summary import summarize_run
from echelon.training.loop import RankTask
from tests.telemetry.recorded_runs import BATCH_S, TAIL_S, plan_of, stage_times, write_run
from tests.telemetry.runs import make_run, plain_events
from tests.training.small_runs import small_data, small_job

EVEN = stage_times(1.0, 1.0)
GATHER_S = 0.001
"""What the ranks of written runs take to agree on a step, when the last has come."""
UPDATE_S = 1.0 - GATHER_S
"""What every rank of written runs takes to update."""

DP2 = ("mesh.dp_replicate=2",)
PP4 = ("mesh.pp=4", "model.layers=4", "pipeline.schedule=gpipe", "batch.global_sequences=4")
SETTINGS = ("train.steps=3", "batch.global_sequences=4", "checkpoint.every=3")

SLEEPS = {
    # where, seconds of each call, ranks, layout; what binds then
    "data": ("data", 1.2, (0, 1), DP2, Bound.DATA),
    "collective": ("sum", 1.2, (0, 1), DP2, Bound.COMMUNICATION),
    "update": ("update", 1.2, (0, 1), DP2, Bound.MEMORY),
    "product": ("product", 0.05, (0, 1), DP2, Bound.COMPUTE),
    "stage": ("product", 0.1, (1,), PP4, Bound.BUBBLE),
    "data of one rank": ("data", 1.2, (1,), DP2, Bound.DATA),
}
"""A step without a sleep takes some hundredths of a second: only much noise comes near to these."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("text"))


@pytest.mark.system("S46")
@pytest.mark.quick("data of one rank")
@pytest.mark.parametrize("case", SLEEPS)
def test_a_planted_sleep_flips_the_verdict(
    case: str, rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """S46: the longest part of a real run's step is where its ranks sleep."""
    where, seconds, ranks, layout, expected = SLEEPS[case]
    job = small_job((*SETTINGS, *layout))
    run = create_run(
        tmp_path, "run", name_was_given=True, plan=job.plan, run_toml="", environment={}
    )
    task = RankTask(
        job=job,
        run_dir=str(run.path),
        data=str(data),
        observer="echelon.telemetry.observer:observe_rank",
    )
    argument = {"task": to_json(task), "where": where, "seconds": seconds, "ranks": ranks}
    rank_pool.run(
        "tests.telemetry.bound.targets:train_with_a_sleep", argument, job.plan.mesh.world_size
    )
    found = read_bound(run.path, job.plan)
    assert found is not None
    assert found.binds is expected, found.seconds
    assert found.margin_s > 0
    assert found.step_s > seconds
    text = summary_text(summarize_run(run.path))
    assert f"bound by    {expected.value}: " in text


def test_a_step_is_cut_into_five_parts_that_add_up(tmp_path: Path) -> None:
    """S46: stages of 1 s forward and 2 s backward, p = 2: both ranks idle (p - 1) (1 + 2) s."""
    plan = plan_of()
    run = write_run(tmp_path, plan, [{1: EVEN, 2: EVEN, 3: EVEN}], clocks={1: -40.0})
    found = read_bound(run.path, plan)
    assert found is not None
    floor_s = sum(memory_bound_seconds(plan)) / 2 * plan.num_microbatches
    work_s = 3.0 * plan.num_microbatches
    assert found.steps == (1, 2, 3)
    assert found.seconds == pytest.approx(
        {
            Bound.COMPUTE: work_s - floor_s,
            Bound.MEMORY: UPDATE_S + floor_s,
            Bound.COMMUNICATION: GATHER_S,
            Bound.DATA: BATCH_S,
            Bound.BUBBLE: 3.0,
        },
        abs=1e-6,
    )
    assert (found.binds, found.second) == (Bound.COMPUTE, Bound.BUBBLE)
    assert found.margin_s == pytest.approx(work_s - floor_s - 3.0, abs=1e-6)
    assert found.waits_s.keys() == {"pp", "world"}


def test_sums_after_the_last_action_are_communication(tmp_path: Path) -> None:
    plan = plan_of("mesh.dp_replicate=2")
    run = write_run(tmp_path, plan, [{1: EVEN}])
    found = read_bound(run.path, plan)
    assert found is not None
    assert found.seconds[Bound.COMMUNICATION] == pytest.approx(TAIL_S + GATHER_S, abs=1e-6)
    assert found.seconds[Bound.BUBBLE] == pytest.approx(3.0, abs=1e-6)


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    assert read_bound(make_run(tmp_path).path, plan_of(pp=1)) is None
    plan = plan_of()
    run = write_run(tmp_path / "old", plan, [{1: EVEN, 2: EVEN}])
    for rank in range(2):
        path = plain_events(run.path, rank)
        lines = path.read_text().splitlines()
        older = [{k: v for k, v in json.loads(one).items() if k != "waited_s"} for one in lines]
        path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in older))
    assert read_bound(run.path, plan) is None, "an earlier version recorded no waits"


def test_memory_sets_the_pace_of_norms_activations_and_residuals_only() -> None:
    """The floor is bytes over bandwidth: in half the bandwidth it takes twice as long."""
    plan = plan_of("model.layers=4")
    device = plan.cluster.device
    slow = replace(device, memory_bandwidth=device.memory_bandwidth / 2)
    slower = replace(plan, cluster=replace(plan.cluster, device=slow))
    first, second = memory_bound_seconds(plan), memory_bound_seconds(slower)
    assert len(first) == 2
    assert min(first) > 0
    assert second == pytest.approx([2 * one for one in first])
