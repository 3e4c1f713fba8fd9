# SPDX-License-Identifier: Apache-2.0
"""The state of one asynchronous server: clocks of workers, versions, and how a push is applied.

Threads, one for each worker, bring pushes; a lock lets one of them update at a time. With a bound
of 0 the last push of a step updates, with the sum of all in the order of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

import torch

from echelon.core.choices.updates import AppliedGradient, Updates
from echelon.core.errors import EchelonError
from echelon.parallel.servers import ASKS_TO_STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Hold what one worker sent for one of its steps."""

    worker: int
    """Who."""
    step: int
    """Which of its steps, from 0."""
    version: int
    """The version of this server's range that the gradient was computed from."""
    tokens: int
    """Counted tokens of the global batch of that step."""
    gradients: Sequence[torch.Tensor]
    """The range of each bucket."""
    loss: float
    """Its share of the mean loss; of an update of its own, the estimate by its tokens."""
    norm_squared: float
    """Squared norm of its whole gradient."""
    stop_after: int
    """The step after which the run stops, as far as it knows; 0 for none, ASKS_TO_STOP to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold what a worker is told after its push."""

    version: int
    loss: float
    stop_after: int
    values: Sequence[torch.Tensor]
    """A copy of the range of each bucket, all of one version."""


Update = Callable[[Sequence[Push], int], None]
"""Apply the pushes of one update, whose staleness is the second argument."""


@dataclass(slots=True)
class Served:
    """Take pushes, and let workers go on as the bound allows."""

    updates: Updates
    """When pushes are applied, and how far workers may part."""
    clocks: list[int]
    """Steps that each worker has done."""
    update: Update
    """What changes the ranges."""
    snapshot: Callable[[], Sequence[torch.Tensor]]
    """What copies the ranges."""
    decides: bool
    """Whether this server says when the run stops: the first one."""
    version: int = 0
    """Updates that were made."""
    stop_after: int = 0
    """The step after which the run stops; 0 for none."""
    applied: deque[AppliedGradient] = field(default_factory=deque[AppliedGradient])
    """What was applied and is not written down yet."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """Loss of each step, of as many workers as have pushed it."""
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    """Counted tokens of the global batch of each step."""
    error: BaseException | None = None
    """What a thread could not go on for."""
    _changed: Condition = field(default_factory=Condition)
    """Held by who changes any of these, and told of each change."""
    _waiting: dict[int, Push] = field(default_factory=dict[int, Push])
    """With a bound of 0, the pushes of a step that has not all of them."""

    def take(self, push: Push) -> Answer:
        """Apply a push, and return the answer when its worker may begin the next step."""
        with self._changed:
            self._check()
            self.tokens[push.step] = push.tokens
            if self.updates.applies_each:
                self.losses[push.step] = self.losses.get(push.step, 0.0) + push.loss
                self._apply([push])
            else:
                self._waiting[push.worker] = push
                if len(self._waiting) == len(self.clocks):
                    every = [self._waiting[worker] for worker in sorted(self._waiting)]
                    self.losses[push.step] = sum(one.loss for one in every)
                    self._apply(every)
                    self._waiting.clear()
            self.clocks[push.worker] = push.step + 1
            if push.stop_after > 0:
                self.stop_after = push.stop_after
            elif push.stop_after == ASKS_TO_STOP and self.decides:
                self._stop()
            self._changed.notify_all()
            bound = self.updates.max_staleness
            self._changed.wait_for(
                lambda: self.error is not None or min(self.clocks) >= push.step + 1 - bound
            )
            self._check()
            loss = push.loss if self.updates.applies_each else self.losses[push.step]
            return Answer(
                version=self.version,
                loss=loss,
                stop_after=self.stop_after,
                values=self.snapshot(),
            )

    def newest(self, num_steps: int) -> Answer:
        """Return the parameters as they are when every worker has done so many steps."""
        with self._changed:
            self._wait_for(num_steps)
            return Answer(
                version=self.version,
                loss=0.0,
                stop_after=self.stop_after,
                values=self.snapshot(),
            )

    def wait_for(self, num_steps: int) -> None:
        """Return when every worker has done so many steps; raise what a thread has met."""
        with self._changed:
            self._wait_for(num_steps)

    def _wait_for(self, num_steps: int) -> None:
        self._changed.wait_for(lambda: self.error is not None or min(self.clocks) >= num_steps)
        self._check()

    def request_stop(self) -> None:
        """Let the run stop, where this server is the one to say when."""
        with self._changed:
            if self.decides:
                self._stop()

    def fail(self, error: BaseException) -> None:
        """Learn that a thread cannot go on."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _apply(self, pushes: Sequence[Push]) -> None:
        staleness = max(self.version - push.version for push in pushes)
        self.update(pushes, staleness)
        self.applied.extend(
            AppliedGradient(
                worker=one.worker, step=one.step, read=one.version, version=self.version
            )
            for one in pushes
        )
        self.version += 1

    def _stop(self) -> None:
        """Choose a step to stop after of which all workers hear in time.

        None has ended more steps than the fastest, m; each hears of it with the answer to step m at
        the latest, and can tell the other servers with step m + 1.
        """
        self.stop_after = self.stop_after or max(self.clocks) + 2

    def _check(self) -> None:
        if isinstance(self.error, EchelonError):
            raise self.error
        if self.error is not None:
            raise RuntimeError("a worker of this server is lost") from self.error
