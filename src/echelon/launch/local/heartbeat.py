# SPDX-License-Identifier: Apache-2.0
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
from dataclasses import replace
from typing import NoReturn

from echelon.launch.context import LostRank, RankProgress
from echelon.launch.desync.connections import own_connections
from echelon.launch.local.channel import Channel
from echelon.launch.local.messages import ExitRequest, Heartbeat, Notice, RankJob
from echelon.launch.local.output import say_if_possible
from echelon.launch.local.stacks import stacks_of_process

HEARTBEAT_INTERVAL_S = 0.5
EXIT_ENDED = 1  # exit code


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
                self._progress.clear_stop()
                self._progress.lost = list(message.lost)
                self.inbox.put(message)
            case Notice.LEAVE_GROUP | Notice.NO_MORE_JOBS:
                self._working = False
                self.inbox.put(message)
            case LostRank():
                self._progress.lost.append(message)
            case Notice.STOP:
                self._progress.request_stop()
            case Notice.TELL_STACKS:
                stacks = stacks_of_process(self._main)
                now = self._progress
                told = replace(
                    stacks,
                    waiting=now.waiting or stacks.waiting,
                    turn=now.turn,
                    unfinished=now.unfinished,
                    connections=own_connections(),
                )
                self._channel.send(told)
            case ExitRequest(reason=reason):
                end_process(reason)
            case _:
                raise AssertionError(f"no rank knows the message {message!r}")


def end_process(reason: str) -> NoReturn:
    """Write `reason` to the log and leave without waiting for anything."""
    say_if_possible(f"{time.strftime('%H:%M:%S')} ends: {reason}", sys.__stderr__)
    os._exit(EXIT_ENDED)
