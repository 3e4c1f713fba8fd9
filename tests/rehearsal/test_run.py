"""A whole plan, rehearsed: which ranks, how many microbatches, and what is said of them."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.cost.peak.rank_peak import with_few_microbatches
from echelon.rehearsal.run import RehearsedCount, on_nccl, rehearse
from tests.proof.run.collectives import summed

RUNS = (
    "nano-zero3",
    "toy-experts",
    "toy-finetuning",
    "toy-limited",
    "toy-pretraining",
    "toy-production",
    "toy-serving",
)

LARGE = (
    "mesh.pp=2",
    "mesh.cp=2",
    "mesh.dp_replicate=8",
    "model.layers=4",
    "batch.microbatch_sequences=1",
    "batch.global_sequences=32",
    "cluster.preset=32xcpu",
)
"""32 ranks."""


def plan_of(*flags: str, run: str = "nano") -> Plan:
    return load_job(run, flags).plan


@pytest.mark.one_in(3)
@pytest.mark.parametrize("run", RUNS)
def test_the_runs_of_the_presets_hold(run: str) -> None:
    found = rehearse(plan_of(run=run), workers=1)
    found.require()
    assert len(found.ranks) == found.plan.mesh.world_size
    if found.plan.model.experts is None:
        for rank in found.ranks:
            assert dict(rank.sent) == dict(found.sent[rank.rank])


@pytest.mark.parametrize(("each", "algorithm"), [(2, "hierarchical"), (4, "tree"), (4, "ring")])
def test_sums_that_are_made_of_messages_hold_and_send_what_each_rank_does(
    each: int, algorithm: str
) -> None:
    found = rehearse(summed(dp=4, each=each, algorithm=algorithm), workers=1)
    found.require()
    for rank in found.ranks:
        assert dict(rank.sent) == dict(found.sent[rank.rank])
    assert len({dict(rank.sent)["dp"] for rank in found.ranks}) == (2 if algorithm == "tree" else 1)


def test_processes_find_what_one_finds() -> None:
    plan = plan_of("mesh.pp=2", "model.layers=4")
    one, two = (rehearse(plan, workers=workers) for workers in (1, 2))
    assert [each.rank for each in two.ranks] == [0, 1]
    for first, second in zip(one.ranks, two.ranks, strict=True):
        assert first.peak_bytes == second.peak_bytes
        assert first.work == second.work
    assert one.num_operations == two.num_operations


@pytest.mark.slow
def test_two_rounds_stand_for_many() -> None:
    plan = plan_of("mesh.pp=2", "model.layers=4", "batch.global_sequences=46")
    few = with_few_microbatches(plan)
    assert (plan.num_microbatches % 2, few.num_microbatches) == (
        few.num_microbatches % 2,
        4 + plan.num_microbatches % 2,
    )
    assert few.layout == plan.layout
    short, whole = rehearse(plan, workers=1), rehearse(plan, workers=1, whole=True)
    assert short.num_microbatches == whole.plan.num_microbatches == plan.num_microbatches
    assert short.holds
    assert whole.holds
    for found in (short, whole):
        assert dict(found.ranks[0].sent) == bytes_sent_by_axis(found.plan, 0)
    # A loss is kept until its step ends; but for that, the peaks are the same.
    extra = whole.ranks[0].peak_bytes - short.ranks[0].peak_bytes
    assert 0 <= extra <= 16 * 1024 * (plan.num_microbatches - few.num_microbatches)


@pytest.mark.quick("flags0-3")
@pytest.mark.parametrize(
    ("flags", "microbatches"),
    [
        (("batch.global_sequences=40",), 3),
        (("mesh.pp=3", "batch.global_sequences=40", "model.layers=6"), 6 + 20 % 3),
        (
            (
                "mesh.pp=3",
                "batch.global_sequences=40",
                "model.layers=6",
                "pipeline.schedule=dualpipe-v",
            ),
            6 + 20 % 3,
        ),
        (
            (
                "mesh.pp=2",
                "batch.global_sequences=40",
                "model.layers=4",
                "pipeline.schedule=interleaved-1f1b",
                "pipeline.virtual_stages=2",
            ),
            4,
        ),
    ],
)
def test_as_few_microbatches_are_rehearsed_as_the_schedule_takes(
    flags: tuple[str, ...], microbatches: int
) -> None:
    plan = plan_of(*flags)
    few = with_few_microbatches(plan)
    assert (plan.num_microbatches, few.num_microbatches) == (20, microbatches)
    found = rehearse(plan, workers=1)
    found.require()
    whole = rehearse(plan, workers=1, whole=True)
    for short, long in zip(found.ranks, whole.ranks, strict=True):
        # A loss is kept until its step ends; but for that, the peaks are the same.
        extra = long.peak_bytes - short.peak_bytes
        assert 0 <= extra <= 16 * 1024 * (plan.num_microbatches - microbatches)


def test_short_steps_are_rehearsed_whole() -> None:
    plan = plan_of("mesh.pp=2", "model.layers=4", "batch.global_sequences=8")
    assert with_few_microbatches(plan) == plan


@pytest.mark.slow
def test_a_large_world_is_rehearsed_by_its_classes() -> None:
    plan = plan_of(*LARGE)
    found = rehearse(plan, workers=1)
    found.require()
    assert len(found.ranks) == 3  # both context ranks of the first stage, one of the last
    for rank in found.ranks:
        assert dict(rank.sent) == bytes_sent_by_axis(found.plan, rank.rank)


def test_a_plan_for_a_cpu_is_rehearsed_as_on_gpus() -> None:
    plan = plan_of()
    assert (plan.cluster.backend, on_nccl(plan).cluster.backend) == ("gloo", "nccl")
    assert on_nccl(on_nccl(plan)) == on_nccl(plan)


def test_it_says_how_many_ranks_are_done_and_how_long_the_others_take(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((100.0, 112.0))
    monkeypatch.setattr("echelon.rehearsal.run.time.monotonic", lambda: next(now_s))
    with caplog.at_level("INFO", logger="echelon.progress"):
        progress = RehearsedCount(8, "ranks rehearsed")
        progress.log(0)
        progress.log(3)
    assert caplog.messages == [
        "0 of 8 ranks rehearsed",
        "3 of 8 ranks rehearsed, about 20 s left",
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_it_says_what_is_left_before_a_rank_is_done(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="echelon.progress"):
        rehearse(plan_of("mesh.dp_replicate=2"), workers=workers)
    assert caplog.messages[0] == "0 of 2 ranks rehearsed, each for all that are like it"
    assert caplog.messages[-1] == "checking that the operations of all ranks have one order"
