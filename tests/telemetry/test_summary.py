"""What became of a run: the last take of each step counts, and what there is not is None."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.choices.updates import AppliedGradient
from echelon.core.event import APPLY, Event
from echelon.core.plan import Plan
from echelon.telemetry.events import METRICS_FILE, EventWriter, StepSampler, step_mark
from echelon.telemetry.summary import staleness_of_run, summarize_rounds, summarize_run
from tests.parallel.servers.test_server import served_plan
from tests.telemetry.recorded_runs import create_run
from tests.telemetry.runs import make_run
from tests.training.servers.test_served import with_updates

SETS = ("mesh.dp_replicate=2", "local_sgd.every=2", "train.steps=1000")

ORDER = [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 2), (1, 1, 2, 3), (0, 2, 3, 4)]


def step(number: int, loss: float, seconds: float, **more: object) -> dict[str, object]:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 100,
        "step_s": seconds,
        "peak_bytes": 10 * number,
        **more,
    }


def test_a_run_that_did_nothing_has_no_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = summarize_run(run.path)
    assert (found.name, found.starts, found.steps, found.tokens) == ("nano", 0, 0, 0)
    assert found.plan_hash == run.plan().content_hash()
    assert found.total_steps == run.plan().mathematics.optimizer.total_steps
    assert {found.first_loss, found.best_validation, found.step_s, found.tokens_per_s} == {None}
    assert (found.peak_bytes, found.dropped_share, found.checkpoints) == (None, None, ())


def test_steps_taken_again_count_once_as_they_were_taken_last(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    routed = {"imbalance": 1.5, "assignments": 50, "dropped": 10}
    lines = [
        {"kind": "start", "step": 0, "steps": 9},
        step(1, 4.0, 1.0, **routed),
        step(2, 9.0, 9.0),
        {"kind": "validation", "step": 2, "loss": 3.5},
        {"kind": "start", "step": 1, "steps": 10},
        step(2, 3.0, 0.5, **(routed | {"imbalance": 1.25, "dropped": 0})),
        step(3, 2.0, 0.25),
        {"kind": "validation", "step": 2, "loss": 3.0},
        {"kind": "validation", "step": 3, "loss": 3.25},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "metrics.jsonl").write_text(text)
    found = summarize_run(run.path)
    assert (found.starts, found.steps, found.total_steps, found.tokens) == (2, 3, 10, 300)
    assert (found.first_loss, found.last_loss) == (4.0, 2.0)
    assert (found.first_validation, found.last_validation, found.best_validation) == (
        3.0,
        3.25,
        3.0,
    )
    assert found.num_validations == 2
    # Medians over steps: 0.25, 0.5 and 1 s of 100 tokens each.
    assert (found.step_s, found.tokens_per_s, found.peak_bytes) == (0.5, 200.0, 30)
    assert (found.first_imbalance, found.last_imbalance) == (1.5, 1.25)
    assert found.dropped_share == 0.1


def run_of(folder: Path, plan: Plan, *, steps: int = 4, sampler: StepSampler | None = None) -> Path:
    """Return a run of some steps, in which a round ended every two."""
    run = create_run(
        folder,
        "run",
        name_was_given=True,
        plan=plan,
        run_toml='extends = "nano"\n',
        environment={"host": "here"},
    )
    writer, lines = EventWriter(run.path, 0, sampler), [{"kind": "start", "steps": steps}]
    for number in range(1, steps + 1):
        mark = step_mark(number, [0.5 * number, 0.25])
        step = {"kind": "step", "step": number, "mark": mark, "tokens": 1, "loss": 1.0}
        lines.append({**step, "step_s": 0.5, "tokens_per_s": 2.0, "peak_bytes": 1})
        writer.record(Event(kind="load", name="batch"))
        sent = [("outer gradients.bucket0", 90), ("round", 8)] if number % 2 == 0 else []
        for name, count in (("gradients.bucket0", 1000), *sent):
            event = Event(kind="all_reduce", name=name, axis="dp_replicate", bytes=count)
            writer.record(event)
        writer.end_step(mark, number)
    writer.close()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / METRICS_FILE).write_text(text, encoding="utf-8")
    return run.path


def test_rounds_and_the_bytes_of_a_mean_step(tmp_path: Path) -> None:
    plan = load_job("nano", SETS).plan
    found = summarize_rounds(run_of(tmp_path, plan), plan)
    assert found is not None
    assert (found.every, found.rounds, found.steps, found.sent_bytes) == (2, 2, 4, 196)
    assert found.mean_bytes == 49
    assert found.planned_bytes > 0
    assert summarize_run(tmp_path / "run").rounds == found


def test_rounds_that_are_left_out_change_no_mean(tmp_path: Path) -> None:
    plan = load_job("nano", SETS).plan
    sampler = StepSampler(budget_bytes=6000, last_step=200, round_steps=2)
    summary = summarize_rounds(run_of(tmp_path, plan, steps=200, sampler=sampler), plan)
    assert summary is not None
    assert sampler.stride > 1
    assert summary.steps < 100
    assert (summary.rounds, summary.mean_bytes) == (100, 49)


def test_a_run_without_islands_has_none(tmp_path: Path) -> None:
    plan = load_job("nano").plan
    assert summarize_rounds(run_of(tmp_path, plan), plan) is None


@pytest.mark.system("S07")
def test_each_worker_has_a_histogram(tmp_path: Path) -> None:
    """S07: staleness is version less read; what was taken again counts as it was last."""
    plan = with_updates(served_plan(2, 1), 2)
    writer = EventWriter(tmp_path, 2)
    for worker, step, read, version in [(0, 2, 0, 4), *ORDER]:
        one = AppliedGradient(worker=worker, step=step, read=read, version=version)
        assert AppliedGradient.from_event(one.event_name) == one
        writer.record(Event(kind=APPLY, name=one.event_name, rank=2))
    writer.close()

    first, second = staleness_of_run(tmp_path, plan)

    assert first.histogram == {0: 1, 1: 2}
    assert second.histogram == {1: 2}
    assert (first.num_applied, first.mean) == (3, 2 / 3)


def test_synchronous_servers_have_none(tmp_path: Path) -> None:
    """S06: no gradient is stale."""
    assert staleness_of_run(tmp_path, served_plan(2, 1)) == ()
