# SPDX-License-Identifier: Apache-2.0
"""A server of a run that goes on without a lost worker, and takes it in when it is back.

Threads are those of workers that may not be there: each waits for its worker, meets it in a pair,
and serves it until the pair breaks. What a push changes is decided by all servers (`links.py`), and
who is there by all servers where everything rests (`members.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from echelon.core.choices.updates import WorkerChange
from echelon.core.event import LOST, THERE, Event
from echelon.launch.context import LostRank, RankContext
from echelon.models.batch import TokenBatch
from echelon.parallel.servers.links import PairLinks, WorkerLost, broken_pairs
from echelon.parallel.servers.messages import BEGIN, LEAVES, WORKER, receive_numbers
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.device_mesh import EventQueue
from echelon.training.optimizer.learning_rate import learning_rate
from echelon.training.servers.absences import Absence, AbsenceLog
from echelon.training.servers.members import ElasticServed
from echelon.training.servers.served import Answer, Push
from echelon.training.servers.server import AsynchronousServer
from echelon.training.steps.part import StepResult

_LOOKS_EVERY_S = 0.05


class ElasticServer(AsynchronousServer):
    """Hold a server's ranges, and serve the workers that are there."""

    served: ElasticServed

    def __init__(self, *args: Any, **named: Any) -> None:
        """Build the server; nobody is there before `begin`."""
        super().__init__(*args, **named)
        mesh = self.plan.mesh
        self.served = ElasticServed(
            updates=self.plan.mathematics.updates,
            clocks=[0] * mesh.num_workers,
            update=self._apply,
            snapshot=self._snapshot,
            decides=self.groups.rank == mesh.server_ranks[0],
        )
        self._links: PairLinks | None = None
        self._lost: Sequence[LostRank] = ()
        share = self.plan.mathematics.global_sequences // mesh.num_workers
        self.absences = AbsenceLog(num_workers=mesh.num_workers, share=share)
        self.changes: list[WorkerChange] = []

    def connect(self, context: RankContext, message_s: float, meets: Callable[[int], bool]) -> None:
        """Learn where workers are met, and after which steps the loop needs everything at rest."""
        recorder = self.groups.recorder.beside(EventQueue(self.quiet_events))
        self._links = PairLinks(
            plan=self.plan, store=context.store, recorder=recorder, message_s=message_s
        )
        self._lost, self.served.loop_meets = context.progress.lost, meets

    def begin(self, step: int) -> None:
        """Wait until every worker is here that can come, and take them in after `step` steps."""
        self._start()
        while not self._all_are_here(admitted := self._who_is_here()):
            time.sleep(_LOOKS_EVERY_S)
            self.served.wait_for(0)  # raises what a thread has met
        self.served.begin(step, admitted)

    def step(
        self,
        batches: Sequence[TokenBatch],
        step: int,
        *,
        stop_requested: bool = False,
        used_bytes: int = 0,
    ) -> StepResult:
        """Return when every worker that is there has done step `step`."""
        del batches
        served = self.served
        if stop_requested:
            served.request_stop()
        with self.groups.recorder.waiting(f"pushes of step {step + 1}"):
            served.wait_for(step + 1)
        self._tell()
        self.num_updates = served.version
        loss, norm, tokens = served.facts_of(step)
        return StepResult(
            step=step + 1,
            loss=loss,
            tokens=tokens,
            grad_norm=norm,
            learning_rate=learning_rate(self.plan.mathematics.optimizer, step),
            loss_scale=1.0,
            skipped=False,
            stop_requests=int(served.stop_after == step + 1),
            rank_waits_s=(),
            rank_used_bytes=(used_bytes,),
            routing=None,
            loads={},
            microbatch_losses={},
        )

    def go_on(self, step: int, *, ends: bool) -> Sequence[str]:
        """Let workers go on after `step` steps, and take in who waits if all meet there.

        Where the run `ends` nobody comes in. Return who was lost and who came since the last time:
        the first server tells it.
        """
        if ends:
            self.served.end()
        self.served.meet(step, dict if ends else self._who_is_here)
        return self.absences.news(self._lost) if self.served.decides else ()

    def close(self) -> None:
        """Let workers leave, and those that come too late."""
        self.served.end()
        super().close()

    def _start(self) -> None:
        assert self._links is not None, "a server is connected before its first step"
        workers = range(self.plan.mesh.num_workers)
        self._start_threads(
            (self._attend, (worker, self._links.for_thread())) for worker in workers
        )
        self._links.open()

    def _who_is_here(self) -> Mapping[int, int]:
        """Return the attempts of workers that wait at all servers; every server asks together."""
        waiting = self.served.waiting
        mine = [waiting.get(worker, -1) for worker in range(self.plan.mesh.num_workers)]
        row = torch.tensor(mine, dtype=torch.int64)
        rows = self.groups.server_peers.gather_rows(row, name="workers that wait")
        attempts = zip(*rows.tolist(), strict=True)
        return {
            worker: every[0]
            for worker, every in enumerate(attempts)
            if every[0] >= 0 and len(set(every)) == 1
        }

    def _all_are_here(self, admitted: Mapping[int, int]) -> bool:
        """Return whether to begin: all servers find the same, what the first knows being told."""
        gone = {one.rank for one in self._lost if not one.returns}
        row = torch.tensor([int(one in gone) for one in range(self.plan.mesh.num_workers)])
        first = self.groups.server_peers.gather_rows(row, name="workers that are lost")[0]
        return all(
            worker in admitted or bool(lost) for worker, lost in enumerate(first.tolist())
        ) and bool(admitted)

    def _attend(self, worker: int, links: PairLinks) -> None:
        """Serve one worker whenever it is there."""
        attempt = 0
        try:
            while True:
                found = links.wait_for(worker, attempt, lambda: self.served.ended)
                if found is None or self._serve_attempt(worker, found, links):
                    return
                attempt = found + 1
        except BaseException as error:  # the main thread raises it
            self.served.fail(error)

    def _serve_attempt(self, worker: int, attempt: int, links: PairLinks) -> bool:
        """Serve a worker until it leaves (True) or is lost."""
        next_step = None
        try:
            pair = links.meet_worker(worker, attempt)
            with broken_pairs():
                receive_numbers(pair, WORKER, BEGIN)
            found = self.served.arrive(
                worker, attempt, lambda: (links.attempt_of(worker) or 0) > attempt
            )
            if found is None:
                self._turn_away(pair)
                return False
            next_step = int(found.loss)
            with broken_pairs():
                self._answer(pair, found)
            while True:
                with broken_pairs():
                    push = self._receive(worker, pair)
                if push is None and self.served.ended:
                    self.served.leave(worker)
                    return True
                if push is None:
                    raise WorkerLost("it ends before the run does")
                assert isinstance(push, Push), "a rule refuses validation in such a run"
                if not links.applies(worker, attempt, push.step):
                    raise WorkerLost("another server has not the whole of its gradient")
                answer = self.served.take(push)
                next_step = push.step + 1
                if self.served.decides:
                    links.forget(worker, attempt, push.step - 1)
                with broken_pairs():
                    self._answer(pair, answer)
        except WorkerLost:
            if next_step is not None:
                links.drops(worker, attempt, next_step)
                self.served.lose(worker, attempt)
            return False

    def _turn_away(self, pair: Group) -> None:
        """Tell a worker that it came too late; it need not hear it."""
        values = self._snapshot()
        late = Answer(version=self.served.version, loss=LEAVES, stop_after=0, values=values)
        try:
            with broken_pairs():
                self._answer(pair, late)
        except WorkerLost:
            return

    def _tell(self) -> None:
        """Write down what threads have sent and applied, and who came and was lost."""
        super()._tell()
        recorder, changes = self.groups.recorder, self.served.changes
        while changes:
            one = changes.popleft()
            self.changes.append(one)
            self.absences.note(one)
            now, kind = recorder.now(), THERE if one.there else LOST
            name = self._told(one)
            recorder.sink.record(
                Event(kind=kind, name=name, start=now, end=now, rank=self.groups.rank)
            )

    def _told(self, change: WorkerChange) -> str:
        if change.there:
            return f"worker {change.worker} begins with step {change.step + 1}"
        return f"worker {change.worker} has done {change.step} steps"

    def absent(self, steps: int) -> Sequence[Absence]:
        """Return which steps each worker missed in a run of `steps`, and why."""
        self._tell()
        return self.absences.told(steps, self._lost)
