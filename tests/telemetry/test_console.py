"""The step line, the bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
from contextlib import redirect_stderr
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.config.load import load_job
from echelon.core.mesh import Mesh
from echelon.launch.local.output import TerminalAndLog
from echelon.telemetry.console import (
    Console,
    StepLine,
    Throughput,
    TimeRemaining,
    device_memory,
    process_memory,
    scientific,
    short,
)
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.observer import observe_rank
from tests.telemetry.runs import facts, make_run

ONE_RANK = load_job("nano", []).plan
GPUS = replace(
    ONE_RANK,
    layout=replace(ONE_RANK.layout, mesh=Mesh(dp_shard=64)),
    cluster=replace(ONE_RANK.cluster, backend="nccl"),
)
LINE = StepLine(
    facts=replace(facts(120, 2.83412), grad_norm=0.9213, rank_used_bytes=(int(61.8 * 2**30), 9)),
    plan=GPUS,
    total_steps=10_000,
    tokens_per_s=412_312.0,
    memory_bytes=80 * 2**30,
    seconds_left=3 * 3600 + 12 * 60,
    mfu=0.412,
)


def line(step: int, total_steps: int = 10_000, **changes: Any) -> StepLine:
    """Return the line of another step."""
    return replace(LINE, total_steps=total_steps, facts=replace(LINE.facts, step=step, **changes))


def test_the_line() -> None:
    assert LINE.render() == (
        "step 120/10000  loss 2.8341  grad_norm 0.921  lr 3.0e-4  tok/s 412.3k (6.44k/gpu)  "
        "mfu 41.2%  mem 61.8/80.0 GiB  eta 3h12m"
    )


def test_utilization_is_left_out_where_the_peak_is_not_known() -> None:
    small = replace(line(120, rank_used_bytes=(300 * 2**20,)), mfu=None, plan=ONE_RANK)
    assert small.render().endswith("tok/s 412.3k (412.3k/rank)  mem 0.29 GiB  eta 3h12m")
    assert "mfu" not in small.render()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (9.994, "9.99"),
        (99.96, "100.0"),
        (999.9, "1000"),
        (999.96, "1.00k"),
        (6442.4, "6.44k"),
        (412_312, "412.3k"),
        (8.03e9, "8.03B"),
        (2.5e16, "25000T"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3e-4, "3.0e-4"), (0.0, "0"), (1.24e-10, "1.2e-10"), (1.0, "1.0e0")]
)
def test_learning_rates(value: float, text: str) -> None:
    assert scientific(value) == text


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    console = Console(log_every=5, total_steps=12, stream=stream)
    for step in range(1, 13):
        console.step(line(step, 12))
        if step == 6:
            console.noted(6, "validation loss 2.2500")
            console.noted(6, "saved checkpoints/step-000006")
    console.close()
    lines = stream.getvalue().splitlines()
    assert [text.split("  ")[0] for text in lines] == [
        "step 1/12",
        "step 5/12",
        "step 6/12",
        "step 6/12",
        "step 10/12",
        "step 12/12",
    ]
    assert lines[2:4] == [
        "step 6/12  validation loss 2.2500",
        "step 6/12  saved checkpoints/step-000006",
    ]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_the_first_and_the_last_step_are_always_shown() -> None:
    stream = io.StringIO()
    console = Console(log_every=5, total_steps=100, stream=stream)
    for step in range(3, 8):
        console.step(line(step, 100))
    # Ctrl-C ends the run here.
    console.close()
    console.close()
    assert [text.split()[1] for text in stream.getvalue().splitlines()] == [
        "3/100",
        "5/100",
        "7/100",
    ]


def read_until(terminal: int, mark: str, *, last: str) -> str:
    """Return what a terminal shows, up to `last` behind `mark`: it comes in pieces."""
    shown = ""
    while mark not in shown or not shown.endswith(last):
        shown += os.read(terminal, 65536).decode()
    return shown


def test_a_bar_on_a_terminal_and_never_in_the_log() -> None:
    leader, follower = pty.openpty()
    log = io.StringIO()
    try:
        with os.fdopen(follower, "w", buffering=1) as terminal:
            stream = TerminalAndLog(terminal, log)
            console = Console(log_every=2, total_steps=4, stream=stream)  # pyright: ignore[reportArgumentType]
            for step in range(1, 5):
                console.step(line(step, 4))
            console.close()
            shown = read_until(leader, "step 4/4", last="\r\x1b[K")
    finally:
        os.close(leader)
    assert log.getvalue().count("\n") == 3
    assert "\x1b" not in log.getvalue()
    assert "50%  2/4" in shown
    assert "100%  4/4" in shown
    assert shown.endswith("\r\x1b[K")
    assert "step 2/4  loss" in shown


def test_a_loss_scale_and_a_skipped_step_are_said() -> None:
    assert "scale" not in LINE.render()
    assert "  scale 32768  " in line(120, loss_scale=32768.0).render()
    skipped = line(121, loss_scale=65536.0, skipped=True)
    assert "  scale 65536  overflow: step skipped  " in skipped.render()


def test_a_skipped_step_is_shown_whenever_it_comes() -> None:
    stream = io.StringIO()
    console = Console(log_every=100, total_steps=1000, stream=stream)
    for step in (1, 2, 3):
        console.step(line(step, 1000, skipped=step == 3))
    assert [text.split()[1] for text in stream.getvalue().splitlines()] == ["1/1000", "3/1000"]


def test_a_long_run_prints_200_lines_and_keeps_every_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    steps = 1_003
    job = load_job("nano", [f"train.steps={steps}"])
    assert job.observe.log_every == 10
    with redirect_stderr(io.StringIO()) as shown:
        observer = observe_rank(job, run.path, 0)
        for step in range(1, steps + 1):
            observer.stepped(facts(step))
        observer.close()
    lines = [text.split()[1] for text in shown.getvalue().splitlines()]
    assert lines[:2] == ["1/1003", "10/1003"]
    assert lines[-1] == "1003/1003"
    assert len(lines) == 102
    kinds = [entry.text("kind") for entry in read_entries(run.path / "metrics.jsonl")]
    assert kinds.count("step") == steps


def test_throughput_divides_sums_over_the_last_steps() -> None:
    meter = Throughput(window=2)
    assert (meter.tokens_per_s, meter.step_s) == (0.0, 0.0)
    for tokens, seconds in ((5, 100.0), (100, 1.0), (100, 3.0)):
        meter.add(tokens, seconds)
    assert meter.tokens_per_s == 50.0
    assert meter.step_s == 2.0


def test_throughput_leaves_out_the_first_step_once_there_is_a_second() -> None:
    meter = Throughput()
    meter.add(100, 50.0)
    assert meter.tokens_per_s == 2.0
    meter.add(100, 1.0)
    assert (meter.tokens_per_s, meter.step_s) == (100.0, 1.0)
    meter.add(300, 1.0)
    assert meter.tokens_per_s == 200.0


def test_the_time_left_counts_all_that_passes_and_leaves_out_the_first_step() -> None:
    now = [0.0]
    left = TimeRemaining(10, clock=lambda: now[0])
    assert left.seconds(2.0) == 20.0
    now[0] = 50.0
    left.step(1)
    assert left.seconds(3.0) == 27.0
    now[0] = 54.0
    left.step(3)
    assert left.seconds(3.0) == 14.0
    left.step(12)
    assert left.seconds(3.0) == 0


def test_the_memory_of_this_process_grows_with_what_it_holds() -> None:
    before = process_memory()
    held = mmap(-1, 64 * 2**20)  # new pages, never those that something freed before
    held.write(bytes(64 * 2**20))
    after = process_memory()
    assert after.used_bytes - before.used_bytes > 32 * 2**20
    assert after.peak_bytes >= after.used_bytes
    held.close()
    freed = process_memory()
    assert freed.peak_bytes >= after.used_bytes - 2**20
    assert 0 < freed.used_bytes < freed.total_bytes


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 80))
    memory = device_memory()
    assert (memory.used_bytes, memory.peak_bytes, memory.total_bytes) == (3, 5, 80)


def test_the_peak_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    memory = process_memory()
    assert memory.peak_bytes == memory.used_bytes
