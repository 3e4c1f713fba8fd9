"""What the observer of a rank leaves behind, and what a summary reads from it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.observe import summary_text
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.observer import observe_rank, peak_flops, telling_ranks
from echelon.telemetry.summary import summarize_run
from tests.telemetry.runs import facts, make_job, make_run, read_events


def test_observing_imports_no_torch() -> None:
    code = (
        "import sys, echelon.telemetry.observer, echelon.telemetry.summary, "
        "echelon.telemetry.run_directory, echelon.telemetry.run_directory\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_that_was_killed_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, job = make_run(tmp_path), make_job(steps=10, log_every=2)
    first = observe_rank(job, run.path, 0)
    first.validated(0, 5.0)
    for step in range(1, 8):
        first.stepped(facts(step, loss=5 - step / 10))
    first.saved(5, run.checkpoints / "step-000005")
    again = observe_rank(job, run.path, 0)  # the first was killed: it never closed
    for step in range(6, 11):
        again.stepped(facts(step, loss=1 + step))
    again.validated(10, 3.0)
    again.close()
    again.close()
    summary = summarize_run(run.path)
    assert (summary.starts, summary.steps, summary.total_steps) == (2, 10, 10)
    assert (summary.first_loss, summary.last_loss) == (4.9, 11)
    assert (summary.first_validation, summary.last_validation) == (5.0, 3.0)
    assert summary.best_validation == 3.0
    assert summary.tokens == 10_000
    assert (summary.step_s, summary.tokens_per_s) == (0.5, 2000.0)
    assert summary.checkpoints == ()
    assert summary.plan_hash == job.plan.content_hash()
    assert summary.peak_bytes is not None
    assert summary.peak_bytes > 2**20
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "step 0/10  validation loss 5.0000"
    assert "step 2/10  loss 4.8000  grad_norm 0.5  lr 3.0e-4  tok/s 2.00k" in lines[2]
    kinds = [entry.text("kind") for entry in read_entries(run.path / "metrics.jsonl")]
    assert kinds.count("step") == 12
    assert kinds.count("start") == 2
    first.close()


def test_a_run_that_did_nothing_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    summary = summarize_run(run.path)
    assert (summary.steps, summary.starts, summary.tokens) == (0, 0, 0)
    assert summary.last_loss is summary.step_s is summary.peak_bytes is None
    with pytest.raises(ConfigError):
        summarize_run(tmp_path / "none")


def test_one_validation_is_no_change(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    observer = observe_rank(make_job(), run.path, 0)
    observer.validated(10, 5.39)
    observer.close()
    summary = summarize_run(run.path)
    assert (summary.num_validations, summary.last_validation) == (1, 5.39)
    assert "validation  5.3900\n" in summary_text(summary)
    again = observe_rank(make_job(), run.path, 0)
    again.validated(20, 5.0)
    again.close()
    assert "validation  5.3900 -> 5.0000\n" in summary_text(summarize_run(run.path))


def test_a_loss_that_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    observer = observe_rank(make_job(), run.path, 0)
    observer.validated(1, float("nan"))
    observer.close()
    _, validation = read_entries(run.path / "metrics.jsonl")
    assert validation.number("loss") is None
    assert summarize_run(run.path).last_validation is None


def test_every_rank_writes_its_own_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, job = make_run(tmp_path), make_job()
    for rank in (0, 1):
        observer = observe_rank(job, run.path, rank)
        observer.sink.record(Event(kind="send", name="x", axis="pp", bytes=8, rank=rank))
        observer.stepped(facts(1))
        observer.validated(1, 2.0)
        observer.saved(1, run.checkpoints)
        kinds = [(event.kind, event.bytes) for event in read_events(run.path, rank)]
        assert kinds == [("start", 0), ("send", 8), ("step", 0)]
        observer.close()
    assert capsys.readouterr().err.count("step 1/10  loss") == 1
    ends = [list(read_entries(run.logs / f"rank-000{rank}.jsonl")) for rank in (0, 1)]
    assert [(e.whole("rank"), e.whole("peak_bytes") > 0) for (e,) in ends] == [(0, True), (1, True)]


def test_no_events_where_they_are_switched_off(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    observer = observe_rank(make_job(events=False), run.path, 1)
    observer.sink.record(Event(kind="send", name="x"))
    observer.stepped(facts(1))
    observer.close()
    assert not list(run.path.glob("events*"))


def test_utilization_is_shown_where_the_peak_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    assert peak_flops(job.plan) is None
    device = replace(job.plan.cluster.device, peak_flops=(("fp32", 1e9), ("fp64", 5e8)))
    plan = replace(job.plan, cluster=replace(job.plan.cluster, device=device))
    assert peak_flops(plan) == 1e9 * plan.mesh.world_size
    run = make_run(tmp_path)
    observer = observe_rank(replace(job, plan=plan), run.path, 0)
    observer.stepped(facts(1))
    observer.close()
    assert "  mfu " in capsys.readouterr().err


def test_what_else_happened_is_a_line_of_metrics_and_of_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S07: told once, by the first rank."""
    run, job = make_run(tmp_path), make_job(steps=10, log_every=2)
    assert telling_ranks(job.plan) == (0,)
    for one in (observe_rank(job, run.path, rank) for rank in range(2)):
        one.noted(3, "island 1 is lost")
        one.close()
    notes = [e for e in read_entries(run.path / "metrics.jsonl") if e.text("kind") == "note"]
    assert [(one.whole("step"), one.text("text")) for one in notes] == [(3, "island 1 is lost")]
    assert "step 3/10  island 1 is lost" in capsys.readouterr().err


def test_who_is_the_first_island_writes_what_another_could_not(tmp_path: Path) -> None:
    """B06: each step once, in order, whichever island told of it; one start."""
    run, job = make_run(tmp_path), make_job(steps=10)
    local = LocalSgd(every=2, islands=2, min_islands=1)
    mesh = replace(job.plan.layout.mesh, dp_replicate=2, replicas_outermost=True)
    plan = replace(
        job.plan,
        layout=replace(job.plan.layout, mesh=mesh),
        mathematics=replace(job.plan.mathematics, local_sgd=local),
    )
    assert telling_ranks(plan) == (0, 1)
    first, second = (observe_rank(replace(job, plan=plan), run.path, rank) for rank in (0, 1))
    first.speaks(True)
    second.speaks(False)
    for step in range(1, 6):
        met = (0, 1) if step % 2 == 0 else ()
        second.stepped(replace(facts(step), islands=met))
        if step < 4:  # then the first is lost
            first.stepped(replace(facts(step), islands=met))
    first.close()
    second.speaks(True)
    second.stepped(replace(facts(6), islands=(1,)))
    second.noted(6, "island 0 is lost")
    # It comes back, and is the first once more.
    back = observe_rank(replace(job, plan=plan), run.path, 0)
    back.speaks(False)
    second.speaks(False)
    back.speaks(True)
    for one in (back, second):
        one.stepped(facts(7))
        one.noted(7, "island 0 is back")
        one.close()

    entries = list(read_entries(run.path / "metrics.jsonl"))
    assert [one.text("kind") for one in entries if one.text("kind") != "step"] == [
        "start",
        "note",
        "note",
    ]
    steps = [one for one in entries if one.text("kind") == "step"]
    assert [one.whole("step") for one in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [one.values.get("islands") for one in steps] == [
        None,
        [0, 1],
        None,
        [0, 1],
        None,
        [1],
        None,
    ]
