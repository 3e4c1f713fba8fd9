"""Where threads are, and which wait for other ranks that is: by the frames of this process."""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.launch.local.messages import ThreadStacks
from echelon.launch.local.stacks import (
    is_user_file,
    place_of,
    stacks_of_process,
    target_frames,
)


def test_the_main_thread_is_told_first_and_the_own_one_not_at_all() -> None:
    go = threading.Event()
    told: list[str] = []
    other = threading.Thread(target=go.wait, name="waiter")
    teller = threading.Thread(
        target=lambda: told.append(stacks_of_process(threading.main_thread()).text), name="teller"
    )
    other.start()
    teller.start()
    teller.join()
    go.set()
    other.join()
    (text,) = told
    assert text.startswith("thread MainThread:\n")
    assert "thread waiter:" in text
    assert "thread teller:" not in text


def test_a_stack_begins_in_the_target() -> None:
    frames = [
        traceback.FrameSummary("main.py", 1, "main"),
        traceback.FrameSummary(f"launch{os.sep}local{os.sep}rank.py", 2, "call_target"),
        traceback.FrameSummary("mine.py", 3, "train"),
    ]
    found = target_frames(traceback.StackSummary.from_list(frames))
    assert [frame.name for frame in found] == ["train"]
    others = traceback.StackSummary.from_list([frames[0], frames[2]])
    assert target_frames(others) == others


TORCH = """
def all_reduce(tensor, release): release.wait()
def recv(tensor, release, src): release.wait()
def _exchange(tensor, release): release.wait()
"""
PROGRAM = """
import time
def reduces(torch, tensor, release): torch["all_reduce"](tensor, release)
def receives(torch, tensor, release): torch["recv"](tensor, release, 1)
def sleeps(torch, tensor, release): time.sleep(0.3)
def locks(torch, tensor, release): release.wait()
"""


def told_of(function: str, folder: Path) -> ThreadStacks:
    """Return the stacks of a thread that is in a function of a user's program."""
    torch_part: dict[str, Any] = {}
    user: dict[str, Any] = {}
    file = folder / "mine.py"
    file.write_text(PROGRAM, encoding="utf-8")
    exec(compile(TORCH, str(Path(dist.__file__).with_name("part.py")), "exec"), torch_part)
    exec(compile(PROGRAM, str(file), "exec"), user)
    release = threading.Event()
    arguments = (torch_part, torch.zeros(2, 3), release)
    thread = threading.Thread(target=user[function], args=arguments, daemon=True)
    thread.start()
    time.sleep(0.05)
    try:
        return stacks_of_process(thread)
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(
    ("function", "call", "asleep"),
    [
        ("reduces", "all_reduce of float32 [2, 3]", False),
        ("receives", "recv of float32 [2, 3] from rank 1", False),
        ("sleeps", "", True),
        ("locks", "", False),
    ],
)
def test_the_wait_and_the_line_of_the_user_are_told(
    function: str, call: str, asleep: bool, tmp_path: Path
) -> None:
    told = told_of(function, tmp_path)
    assert (told.call, told.asleep) == (call, asleep)
    assert told.place.startswith("mine.py:")


def test_a_place_is_the_innermost_line_of_the_user() -> None:
    torch_file = torch.__file__
    frames = [
        traceback.FrameSummary("/data/train.py", 7, "main", line="step()"),
        traceback.FrameSummary("/data/loss.py", 9, "step", line="loss.backward()"),
        traceback.FrameSummary(torch_file, 3, "backward"),
    ]
    assert place_of(frames) == "loss.py:9 (loss.backward())"
    assert place_of(frames[2:]) == ""
    assert [is_user_file(name) for name in (torch_file, os.__file__, "<frozen x>")] == [False] * 3
