"""What ranks of a test of lost islands do: train, be lost in some way, and wait for who is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from echelon.launch.context import RankContext
from echelon.training.engine import TrainEngine
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.meetings import Meeting
from echelon.training.loop import train_rank
from echelon.training.run_checkpoints import RunCheckpoints
from echelon.training.steps.part import StepResult


def fail(how: str) -> None:
    """Fail in some way."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hang":
        time.sleep(600)
    raise RuntimeError("planted")


def train_and_lose(context: RankContext, argument: Any) -> Any:
    """Train as `task` says; ranks fail once, in the steps that `lost` says, in the way `how`.

    Those of `saves` do so in the middle of the checkpoint after so many steps. The meeting after
    `back` steps, if any, waits for all islands.
    """
    patch = pytest.MonkeyPatch()
    take, connect, save = TrainEngine.step, ElasticOuterSteps.connect, RunCheckpoints._save
    rank = str(context.rank) if not context.attempt else "came back"
    lost, saves = argument.get("lost", {}), argument.get("saves", {})

    def step(self: TrainEngine, batches: Any, number: int, **named: Any) -> StepResult:
        if lost.get(rank) == number:
            fail(argument["how"])
        return take(self, batches, number, **named)

    def saved(self: RunCheckpoints, number: int, *rest: Any) -> Any:
        if saves.get(rank) == number:
            fail(argument["how"])
        return save(self, number, *rest)

    def connected(self: ElasticOuterSteps, *args: Any) -> Any:
        come_in = connect(self, *args)
        islands, until = self._islands.size, time.monotonic() + 100

        def holds(meeting: Meeting) -> bool:
            waits = meeting.step == argument.get("back") and time.monotonic() < until
            return waits and len(meeting.members) + len(meeting.joins) < islands

        self.meetings.holds = holds
        return come_in

    with patch.context() as changed:
        changed.setattr(TrainEngine, "step", step)
        changed.setattr(ElasticOuterSteps, "connect", connected)
        changed.setattr(RunCheckpoints, "_save", saved)
        return train_rank(context, argument["task"])
