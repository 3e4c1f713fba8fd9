"""The thread of a rank that talks to the supervisor while the main thread works.

It sends beats during a job, takes requests, and ends the process when told to or when the
supervisor is gone. A stopped process stops beating; a stuck main thread does not.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback

from echelon.launch.context import RankProgress
from echelon.launch.local.channel import Channel
from echelon.launch.local.messages import ExitRequest, Heartbeat, Notice, RankJob, ThreadStacks

HEARTBEAT_INTERVAL_S = 0.5
EXIT_ENDED = 1  # exit code
CALLER = "call_target"
"""The function that calls targets: what is above it in a stack is ours, and no news."""


class HeartbeatThread(threading.Thread):
    """Beat for one rank; `inbox` gets what is for the main thread."""

    def __init__(self, channel: Channel, progress: RankProgress) -> None:
        """Prepare the thread; `start` starts it."""
        super().__init__(name="heartbeat", daemon=True)
        self.inbox: queue.SimpleQueue[RankJob | Notice] = queue.SimpleQueue()
        self._channel = channel
        self._progress = progress
        self._main = threading.main_thread()
        self._working = False

    def run(self) -> None:
        """Beat and listen until the supervisor is gone."""
        try:
            while True:
                for message in self._channel.receive(HEARTBEAT_INTERVAL_S):
                    self._take(message)
                if self._working:
                    now = self._progress
                    beat = Heartbeat(count=now.count, doing=now.doing, waiting=now.waiting)
                    self._channel.send_if_room(beat)
        except (EOFError, OSError):
            end_process("the supervisor is gone")

    def _take(self, message: object) -> None:
        match message:
            case RankJob():
                self._working = True
                self.inbox.put(message)
            case Notice.LEAVE_GROUP | Notice.NO_MORE_JOBS:
                self._working = False
                self.inbox.put(message)
            case Notice.STOP:
                self._progress.request_stop()
            case Notice.TELL_STACKS:
                text, waiting = stacks_of_process(self._main)
                waiting = self._progress.waiting or waiting
                self._channel.send(
                    ThreadStacks(text=text, waiting=waiting, turn=self._progress.turn)
                )
            case ExitRequest(reason=reason):
                end_process(reason)
            case _:
                raise AssertionError(f"no rank knows the message {message!r}")


def end_process(reason: str) -> None:
    """Write `reason` to the log and leave without waiting for anything."""
    print(f"{time.strftime('%H:%M:%S')} ends: {reason}", file=sys.__stderr__, flush=True)
    os._exit(EXIT_ENDED)


def target_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of a stack from the target on, without those that called it."""
    for index, entry in enumerate(stack):
        if entry.name == CALLER and entry.filename.endswith(f"local{os.sep}rank.py"):
            return traceback.StackSummary.from_list(stack[index + 1 :] or stack[index:])
    return stack


def stacks_of_process(main: threading.Thread) -> tuple[str, str]:
    """Return the stacks of this process's threads, main first, and the collective one is in.

    torch runs backward hooks in threads of its own on GPUs, so each thread counts.
    """
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    waiting = ""
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        summary = target_frames(traceback.extract_stack(frame))
        for entry in reversed(summary[-4:]):
            if f"{os.sep}torch{os.sep}distributed{os.sep}" in entry.filename:
                waiting = waiting or entry.name
        text = "".join(traceback.format_list(summary))
        part = f"thread {names.get(ident, ident)}:\n{text}"
        parts.insert(0 if ident == main.ident else len(parts), part)
    return "\n".join(parts), waiting
