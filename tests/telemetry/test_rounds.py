"""How islands met in a run: bytes of meetings only, each step as it was taken last."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.config.load import load_job
from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.telemetry.events import METRICS_FILE, EventWriter, step_mark
from echelon.telemetry.rounds import summarize_rounds
from echelon.telemetry.sampling import StepSampler
from echelon.telemetry.summary import summarize_run
from tests.telemetry.recorded_runs import create_run

SETS = ("mesh.dp_replicate=2", "local_sgd.every=2", "train.steps=1000")


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
