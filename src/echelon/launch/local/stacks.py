# SPDX-License-Identifier: Apache-2.0
"""Read where the threads of this process are: as text, and which wait for other ranks it is.

Third-party code calls torch.distributed by itself, so nobody has announced its waits: the frames
tell the collective, and its arguments tell the sizes and the ranks that it is among.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.launch.local.messages import ThreadStacks

CALLER = "call_target"
"""The function that calls targets: what is above it in a stack is ours, and no news."""

_NEAR_FRAMES = 4  # innermost frames
_TENSORS = ("tensor", "input_tensor", "input", "output_tensor", "output")
_PEERS = (("src", "from"), ("group_src", "from"), ("dst", "to"), ("group_dst", "to"))
_HANDLE_WAIT = re.compile(r"\.(wait|synchronize)\(")
_SLEEP = re.compile(r"\bsleep\(")
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (
        *(_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[2],
    )
)
_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"


def target_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of a stack from the target on, without those that called it."""
    for index, entry in enumerate(stack):
        if entry.name == CALLER and entry.filename.endswith(f"local{os.sep}rank.py"):
            return traceback.StackSummary.from_list(stack[index + 1 :] or stack[index:])
    return stack


def stacks_of_process(main: threading.Thread) -> ThreadStacks:
    """Return the stacks of this process's threads, main first, and the collective one is in.

    torch runs backward hooks in threads of its own on GPUs, so each thread counts.
    """
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    waiting = call = place = ""
    asleep = False
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        summary = target_frames(traceback.extract_stack(frame))
        for entry in reversed(summary[-_NEAR_FRAMES:]):
            if _DISTRIBUTED in entry.filename:
                waiting = waiting or entry.name
        text = "".join(traceback.format_list(summary))
        part = f"thread {names.get(ident, ident)}:\n{text}"
        parts.insert(0 if ident == main.ident else len(parts), part)
        if ident == main.ident:
            call, place = _call_of(frame, summary), place_of(summary)
            asleep = bool(_SLEEP.search(summary[-1].line or ""))
    return ThreadStacks(
        text="\n".join(parts), waiting=waiting, call=call, place=place, asleep=asleep
    )


def place_of(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a user's program in a stack: ``train.py:31 (loss = ...)``."""
    own = [entry for entry in stack if is_user_file(entry.filename)]
    if not own:
        return ""
    line = f" ({own[-1].line})" if own[-1].line else ""
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}{line}"


def is_user_file(name: str) -> bool:
    """Return whether a file is neither Python's, nor an installed package's, nor ours."""
    return not (name.startswith("<") or str(Path(name).resolve()).startswith(_LIBRARIES))


def _call_of(innermost: FrameType, stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the wait for other ranks that a thread is in, as far as its frames can tell.

    A thread that computes inside torch has such frames too: who asks knows whether it computes.
    """
    frames = list(_frames(innermost))[: len(stack)]
    for frame in frames:
        name = frame.f_code.co_name
        if _DISTRIBUTED in frame.f_code.co_filename and _is_collective(name):
            return f"{name}{_arguments(frame.f_locals)}"
    inner = stack[-1]
    if _DISTRIBUTED in inner.filename:
        return inner.name
    if any(entry.name == "_engine_run_backward" for entry in stack[-_NEAR_FRAMES:]):
        return "backward, where gradients are reduced"
    if _TORCH in inner.filename:
        return f"torch's {inner.name}"
    if is_user_file(inner.filename) and _HANDLE_WAIT.search(inner.line or ""):
        return "the wait for an operation under way"
    return ""


def _frames(innermost: FrameType) -> Iterable[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_collective(name: str) -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return not name.startswith("_") and callable(getattr(distributed, name, None))


def _arguments(values: dict[str, Any]) -> str:
    """Return the tensor, the peer and the ranks of a collective by the arguments of its call."""
    told = ""
    tensor = next((values[key] for key in _TENSORS if hasattr(values.get(key), "shape")), None)
    if tensor is not None:
        told += f" of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    for key, word in _PEERS:
        if isinstance(values.get(key), int):
            told += f" {word} rank {values[key]}"
    ranks = _group_ranks(values.get("group"))
    return told + (f" among ranks {', '.join(map(str, ranks))}" if ranks else "")


def _group_ranks(group: object) -> Sequence[int]:
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        return () if group is None else distributed.get_process_group_ranks(group)
    except (KeyError, RuntimeError, AttributeError, TypeError, ValueError):
        return ()  # something else than a group, or one that is gone
