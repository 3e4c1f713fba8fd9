"""What is written down of experts, what a resumed run leaves, and what is read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.parallel.expert import LayerLoad
from echelon.telemetry.observer import observe_rank
from echelon.telemetry.routing import read_hotspots, read_routing, routing_path
from echelon.telemetry.run_directory import RunDirectory, create_run
from echelon.telemetry.summary import summarize_run
from echelon.training.observer import RoutingSummary, StepFacts
from tests.telemetry.runs import facts

SETTINGS = (
    "model.experts.num_experts=4",
    "model.experts.top_k=1",
    "model.experts.renormalise=false",
    "model.experts.ffn=8",
    "mesh.dp_shard=2",
    "mesh.ep=2",
    "experts.balance=aux",
)


def job_of(*, log_every: int = 1, settings: tuple[str, ...] = ()) -> Job:
    """Return a job of ten steps of a small mixture of experts on two ranks."""
    return load_job(
        "nano",
        [
            *SETTINGS,
            *settings,
            "train.steps=10",
            "optimizer.warmup_steps=2",
            f"observe.log_every={log_every}",
        ],
    )


def run_of(job: Job, folder: Path) -> RunDirectory:
    """Make the folder of a run."""
    return create_run(
        folder,
        "moe",
        name_was_given=True,
        plan=job.plan,
        run_toml='extends = "nano"\n',
        environment={"host": "here"},
    )


def load_of(*counts: int, dropped: int = 0) -> LayerLoad:
    """Return a layer's load."""
    return LayerLoad(counts=counts, dropped=dropped, aux_loss=0.01, z_loss=0.0)


def routed(step: int, loads: Mapping[int, LayerLoad], *, tells: bool = True) -> StepFacts:
    """Return what training says about a step of a model that consists of these layers."""
    summary = RoutingSummary(
        assignments=sum(sum(load.counts) for load in loads.values()),
        dropped=sum(load.dropped for load in loads.values()),
        aux_loss=0.02,
        z_loss=0.0,
        imbalance=max(load.imbalance for load in loads.values()),
    )
    return replace(facts(step), routing=summary, loads=loads if tells else {})


EVEN, SKEWED = load_of(5, 5, 5, 5), load_of(14, 2, 4, 0, dropped=3)


def test_the_step_line_says_how_even_loads_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, said in (
        ((), "experts 2.80x  aux 0.0200"),
        (("experts.capacity_factor=1.25",), "experts 2.80x  dropped 7.5%  aux 0.0200"),
    ):
        job = job_of(settings=settings)
        run = run_of(job, tmp_path / str(len(settings)))
        observer = observe_rank(job, run.path, 0)
        observer.stepped(routed(1, {0: EVEN, 1: SKEWED}))
        observer.close()
        assert f"/rank)  {said}  mem " in capsys.readouterr().err
    entry = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (entry["imbalance"], entry["assignments"], entry["dropped"]) == (2.8, 40, 3)
    assert (entry["aux_loss"], entry["z_loss"]) == (0.02, 0.0)


def test_a_dense_model_says_nothing_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(job_of(), tmp_path)
    observer = observe_rank(job_of(), run.path, 0)
    observer.stepped(facts(1))
    observer.close()
    assert "experts" not in capsys.readouterr().err
    assert "imbalance" not in (run.path / "metrics.jsonl").read_text()
    assert not list(run.path.glob("routing*"))
    assert summarize_run(run.path).first_imbalance is None


def test_loads_are_written_by_who_tells_them_as_often_as_lines(tmp_path: Path) -> None:
    job = job_of(log_every=4)
    run = run_of(job, tmp_path)
    first, other, silent = (observe_rank(job, run.path, rank) for rank in (0, 2, 1))
    for step in range(1, 11):
        first.stepped(routed(step, {0: EVEN}))
        other.stepped(routed(step, {1: SKEWED}))
        silent.stepped(routed(step, {0: EVEN}, tells=False))
    for observer in (first, other, silent):
        observer.close()
    assert not routing_path(run.path, 1).exists()
    lines = [json.loads(line) for line in routing_path(run.path, 2).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 10]
    assert lines[0] == {
        "step": 1,
        "layer": 1,
        "counts": [14, 2, 4, 0],
        "dropped": 3,
        "aux_loss": 0.01,
        "z_loss": 0.0,
    }
    recorded = read_routing(run.path)
    assert list(recorded) == [1, 4, 8, 10]
    assert [load.layer for load in recorded[8]] == [0, 1]
    assert recorded[8][1].imbalance == 14 / 5
    assert recorded[8][1].busiest == 0


def test_steps_that_a_resumed_run_took_again_count_once(tmp_path: Path) -> None:
    job = job_of()
    run = run_of(job, tmp_path)
    killed = observe_rank(job, run.path, 0)
    for step in range(1, 8):
        killed.stepped(routed(step, {0: EVEN, 1: EVEN}))
    again = observe_rank(job, run.path, 0)
    for step in (5, 6):
        again.stepped(routed(step, {0: SKEWED, 1: EVEN}))
    again.close()
    recorded = read_routing(run.path)
    assert list(recorded) == [1, 2, 3, 4, 5, 6]
    assert [loads[0].counts for loads in recorded.values()] == [EVEN.counts] * 4 + [
        SKEWED.counts
    ] * 2
    summary = summarize_run(run.path)
    assert (summary.first_imbalance, summary.last_imbalance) == (1.0, 2.8)
    assert summary.dropped_share == 6 / 240
    killed.close()


@pytest.mark.parametrize("counts", ['"many"', "[]", "[1, true]", "[1.5]", "null"])
def test_a_line_that_was_changed_is_named(counts: str, tmp_path: Path) -> None:
    path = routing_path(tmp_path, 0)
    good = '{"step":1,"layer":0,"counts":[1,2],"dropped":0,"aux_loss":0.0,"z_loss":null}\n'
    path.write_text(good + good.replace("[1,2]", counts))
    with pytest.raises(ConfigError, match="no list of whole numbers") as caught:
        read_routing(tmp_path)
    assert caught.value.rules == ("events-readable",)
    assert f"{path} line 2" in str(caught.value)


def test_a_report_of_a_step_finds_the_fullest_buffer(tmp_path: Path) -> None:
    job = job_of()
    run = run_of(job, tmp_path)
    for rank, sizes in ((0, (300, 700, 100)), (1, (20, 40, 60))):
        observer = observe_rank(job, run.path, rank)
        for step in (1, 2):
            observer.sink.record(Event(kind="load", name="batch", rank=rank))
            for name, size in zip(
                ("experts.combine", "experts.combine", "experts.dispatch"), sizes, strict=True
            ):
                observer.sink.record(
                    Event(kind="all_to_all", name=name, axis="ep", bytes=size * step, rank=rank)
                )
            observer.stepped(routed(step, {0: EVEN, 1: SKEWED}, tells=rank == 0))
        observer.close()
    spots = read_hotspots(run.path)
    assert spots.step == 2
    assert spots.received_bytes == {0: 1400, 1: 80}
    assert (spots.worst.layer, spots.worst.busiest) == (1, 0)
    assert (spots.assignments, spots.dropped) == (40, 3)
    assert read_hotspots(run.path, step=1).received_bytes == {0: 700, 1: 40}
