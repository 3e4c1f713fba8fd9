"""The step line, the bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.launch.output import Tee
from echelon.observe.console import Console, StepLine, scientific, short

LINE = StepLine(
    step=120,
    total_steps=10_000,
    loss=2.83412,
    grad_norm=0.9213,
    learning_rate=3e-4,
    tokens_per_s=412_312.0,
    num_ranks=64,
    rank_word="gpu",
    used_bytes=int(61.8 * 2**30),
    memory_bytes=80 * 2**30,
    seconds_left=3 * 3600 + 12 * 60,
    mfu=0.412,
)


def test_the_line() -> None:
    assert LINE.render() == (
        "step 120/10000  loss 2.8341  grad_norm 0.921  lr 3.0e-4  tok/s 412.3k (6.44k/gpu)  "
        "mfu 41.2%  mem 61.8/80.0 GiB  eta 3h12m"
    )


def test_utilization_is_left_out_where_the_peak_is_not_known() -> None:
    line = replace(LINE, mfu=None, used_bytes=300 * 2**20, rank_word="rank", num_ranks=1)
    assert line.render().endswith("tok/s 412.3k (412.3k/rank)  mem 0.29 GiB  eta 3h12m")
    assert "mfu" not in line.render()


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
        console.step(replace(LINE, step=step, total_steps=12))
        if step == 6:
            console.validated(6, 2.25)
            console.saved(6, Path("checkpoints/step-000006"))
    console.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
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
            stream = Tee(terminal, log)
            console = Console(log_every=2, total_steps=4, stream=stream)  # pyright: ignore[reportArgumentType]
            for step in range(1, 5):
                console.step(replace(LINE, step=step, total_steps=4))
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
    assert "  scale 32768  " in replace(LINE, loss_scale=32768.0).render()
    skipped = replace(LINE, step=LINE.step + 1, loss_scale=65536.0, skipped=True)
    assert "  scale 65536  overflow: step skipped  " in skipped.render()


def test_a_skipped_step_is_shown_whenever_it_comes() -> None:
    stream = io.StringIO()
    console = Console(log_every=100, total_steps=1000, stream=stream)
    for step in (1, 2, 3):
        console.step(replace(LINE, step=step, total_steps=1000, skipped=step == 3))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/1000", "3/1000"]
