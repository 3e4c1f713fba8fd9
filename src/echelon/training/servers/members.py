# SPDX-License-Identifier: Apache-2.0
"""The state of one server of an elastic run: which workers are there, and where all of them meet.

A worker that is lost is counted no longer: the bound is over those that are there. One that was
started again is taken in where everything rests. There every worker that is there has done the same
number of steps, no push is under way, and so all servers have the same versions: servers hold back
all answers to that step until their main threads have met. Checkpoints are written there too.

    meets after a step that   the loop says (checkpoint, validation, the last one)
                              stops the run (`stop_after`)
                              the first server chose for one that waits to come in (`pause_after`)

The first server chooses two steps ahead of the fastest worker, as for a stop; the choice travels
with answers and pushes, so every server knows of it before the first worker ends that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from echelon.core.choices.updates import WorkerChange
from echelon.core.errors import RunFailed
from echelon.core.rulebook.servers import WORKERS_ARE_THERE
from echelon.parallel.servers.messages import ASKS_TO_STOP
from echelon.training.servers.served import Answer, Push, Served

LOOKS_EVERY_S = 0.2
"""Seconds between two looks whether a worker that waits to come in was started once more."""


def _no_step(_: int) -> bool:
    return False


@dataclass(slots=True)
class ElasticServed(Served):
    """Take pushes of the workers that are there, and let in who comes where all meet."""

    loop_meets: Callable[[int], bool] = _no_step
    """Whether the loop does something after so many steps that needs everything at rest."""
    there: set[int] = field(default_factory=set[int])
    """Workers that are in the run."""
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    """Workers that wait to come in: their attempts."""
    pause_after: int = 0
    """The steps after which all meet for those that wait; 0 for none."""
    opened: int = 0
    """Steps after which all have met, or need not."""
    ended: bool = False
    """Whether no step follows."""
    changes: deque[WorkerChange] = field(default_factory=deque[WorkerChange])
    """Who came and who was lost, and is not told yet."""
    pushes: dict[int, int] = field(default_factory=dict[int, int])
    """Pushes of each step."""
    squares: dict[int, float] = field(default_factory=dict[int, float])
    """Squared norms of the gradients of each step, added up."""

    def take(self, push: Push) -> Answer:
        """Apply a push, and return the answer when its worker may begin the next step."""
        with self._changed:
            self._check()
            done = push.step + 1
            self.tokens[push.step] = push.tokens
            self.losses[push.step] = self.losses.get(push.step, 0.0) + push.loss
            self.pushes[push.step] = self.pushes.get(push.step, 0) + 1
            self.squares[push.step] = self.squares.get(push.step, 0.0) + push.norm_squared
            self._apply([push])
            self.clocks[push.worker] = done
            self._hear(push.stop_after)
            self._changed.notify_all()
            bound = self.updates.max_staleness
            self._changed.wait_for(
                lambda: (
                    self.error is not None
                    or (self._slowest() >= done - bound and not self._holds(done))
                )
            )
            self._check()
            return self._answer(push.loss)

    def arrive(self, worker: int, attempt: int, newer: Callable[[], bool]) -> Answer | None:
        """Wait until a worker is taken in, and return what it is told.

        None where it was started once more meanwhile, or the run is over.
        """
        with self._changed:
            self.waiting[worker] = attempt
            self._call_meeting()
            self._changed.notify_all()
            while worker not in self.there:
                self._check()
                if self.ended or newer():
                    self.waiting.pop(worker, None)
                    return None
                self._changed.wait(LOOKS_EVERY_S)
            return self._answer(float(self.clocks[worker]))

    def lose(self, worker: int, attempt: int) -> None:
        """Learn that a worker is lost; RunFailed for all where none is left."""
        with self._changed:
            if worker not in self.there:
                return
            self.there.discard(worker)
            self._note(worker, attempt, there=False)
            if not self.there and not self.ended:
                self.error = self.error or RunFailed(
                    WORKERS_ARE_THERE.problem(
                        "every worker was lost before one that was started again was back"
                    )
                )
            self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """Learn that a worker has done all its steps."""
        with self._changed:
            self.there.discard(worker)
            self._changed.notify_all()

    def meet(self, step: int, take_in: Callable[[], Mapping[int, int]]) -> None:
        """Let everybody go on after `step` steps; where all meet there, take in who waits.

        `take_in` asks all servers who has come to every one of them: worker -> attempt.
        """
        with self._changed:
            here = self._holds(step)
        admitted = take_in() if here else {}
        with self._changed:
            for worker, attempt in sorted(admitted.items()):
                self.waiting.pop(worker, None)
                self.there.add(worker)
                self.clocks[worker] = step
                self._note(worker, attempt, there=True)
            self.opened = step
            if self.pause_after and self.pause_after <= step:
                self.pause_after = 0
            self._call_meeting()
            self._changed.notify_all()

    def begin(self, step: int, admitted: Mapping[int, int]) -> None:
        """Start after `step` steps with the workers `admitted`."""
        with self._changed:
            self.opened = step - 1
            self.clocks = [step] * len(self.clocks)
        self.meet(step, lambda: admitted)

    def end(self) -> None:
        """Say that no step follows."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait_for(self, num_steps: int) -> None:
        """Return when every worker that is there has done so many steps."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._slowest() >= num_steps)
            self._check()

    def facts_of(self, step: int) -> tuple[float, float, int]:
        """Return the mean loss, the mean norm and the tokens of a step that all have done."""
        with self._changed:
            count = max(1, self.pushes.pop(step, 0))
            loss, squares = self.losses.pop(step, 0.0), self.squares.pop(step, 0.0)
            return loss / count, (squares / count) ** 0.5, self.tokens.pop(step, 0)

    def _slowest(self) -> int:
        """Return the steps of the slowest worker that is there; 0 where there is none."""
        return min((self.clocks[worker] for worker in self.there), default=0)

    def _holds(self, step: int) -> bool:
        """Return whether all meet after `step` steps, and have not yet."""
        meets = step in (self.pause_after, self.stop_after) or self.loop_meets(step)
        return meets and self.opened < step

    def _answer(self, loss: float) -> Answer:
        news = self.stop_after or (-1 - self.pause_after if self.pause_after else 0)
        return Answer(version=self.version, loss=loss, stop_after=news, values=self.snapshot())

    def _hear(self, news: int) -> None:
        """Learn what a worker passes on: a step to stop after, or to meet after, or a wish."""
        if news > 0:
            self.stop_after = news
        elif news < ASKS_TO_STOP and -1 - news > self.opened:
            self.pause_after = -1 - news
        elif news == ASKS_TO_STOP and self.decides:
            self._stop()

    def _stop(self) -> None:
        """Choose a step to stop after; while all are to meet, who asks asks again after that."""
        if not self.stop_after and not self.pause_after:
            self.stop_after = self._in_two_steps()

    def _call_meeting(self) -> None:
        """Choose a step to meet after, where somebody waits and this server chooses."""
        if self.decides and self.waiting and self.there and not (self.stop_after or self.ended):
            self.pause_after = self.pause_after or self._in_two_steps()

    def _in_two_steps(self) -> int:
        return max(self.clocks[worker] for worker in self._or_all(self.there)) + 2

    def _or_all(self, workers: Collection[int]) -> Collection[int]:
        return workers or range(len(self.clocks))

    def _note(self, worker: int, attempt: int, *, there: bool) -> None:
        self.changes.append(
            WorkerChange(
                worker=worker,
                attempt=attempt,
                step=self.clocks[worker],
                version=self.version,
                there=there,
            )
        )
