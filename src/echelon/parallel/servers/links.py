# SPDX-License-Identifier: Apache-2.0
"""How a worker and a server of an elastic run meet, part, and agree on what was pushed.

    server  says in the store that it looks for workers
    worker  says in the store that it is here, and which start of it that is (`attempt`)
            meets each server in a pair of their own (`transport/pair.py`)
    server  a thread for each worker waits until it is here, meets it, and serves it
            where the pair breaks the worker is lost, and the thread waits for the next attempt

A gradient is applied by all servers or by none: each counts in the store that it has the whole of
its share, the last one writes the verdict "apply", and one that loses the worker before it has all
writes "drop". The first verdict counts, and every server reads it before it applies anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.launch.process_group import PrefixStore, Store, own_connection
from echelon.parallel.transport.pair import Pair
from echelon.parallel.transport.recorder import Recorder

LOOKS_EVERY_S = 0.1
"""Seconds between two looks for a worker that is not there."""

ASKS_FOR_S = 20.0
"""Seconds for which the store is asked for a verdict before it is asked again."""

APPLY, DROP = "apply", "drop"


class WorkerLost(Exception):
    """Say that the pair with a worker broke; never seen by users."""


@contextmanager
def broken_pairs() -> Iterator[None]:
    """Make WorkerLost of what torch raises inside where the other end of a pair is gone."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLinks:
    """Make the pairs of one rank, through a store that all ranks of the run share.

    A thread must have links of its own (`for_thread`): while one waits in the store, no other can
    ask it anything.
    """

    plan: Plan
    store: Store
    recorder: Recorder
    message_s: float
    """Seconds for which a message may be waited for."""

    def for_thread(self) -> PairLinks:
        """Return the same links over a connection of their own."""
        return PairLinks(
            plan=self.plan,
            store=own_connection(self.store),
            recorder=self.recorder,
            message_s=self.message_s,
        )

    def meet_servers(self, attempt: int) -> list[Pair]:
        """Return the pair of this worker with each server; RuntimeError where one does not come."""
        worker = self.recorder.rank
        limit = timedelta(seconds=self.message_s)
        self.store.wait([_open(server) for server in self.plan.mesh.server_ranks], limit)
        self.store.set(_here(worker), str(attempt))
        return [self._meet(worker, server, attempt) for server in self.plan.mesh.server_ranks]

    def open(self) -> None:
        """Say that this server looks for workers from now on."""
        self.store.set(_open(self.recorder.rank), "1")

    def meet_worker(self, worker: int, attempt: int) -> Pair:
        """Return the pair of this server with a worker that is here; WorkerLost if it is gone."""
        with broken_pairs():
            return self._meet(worker, self.recorder.rank, attempt)

    def attempt_of(self, worker: int) -> int | None:
        """Return how often the worker that is here was started again; None if none came yet."""
        if not self.store.check([_here(worker)]):
            return None
        return int(self.store.get(_here(worker)))

    def wait_for(self, worker: int, attempt: int, ended: Callable[[], bool]) -> int | None:
        """Return the attempt of a worker, once it is `attempt` or later; None once all `ended`."""
        while not ended():
            found = self.attempt_of(worker)
            if found is not None and found >= attempt:
                return found
            time.sleep(LOOKS_EVERY_S)
        return None

    def applies(self, worker: int, attempt: int, step: int) -> bool:
        """Return whether a push counts that this server has the whole of: all servers agree."""
        servers = self.plan.mesh.servers
        if servers == 1:
            return True
        key = _push(worker, attempt, step)
        if self.store.add(f"{key}/whole", 1) == servers:
            return self._verdict(key, APPLY) == APPLY
        while True:
            with suppress(RuntimeError):
                self.store.wait([f"{key}/verdict"], timedelta(seconds=ASKS_FOR_S))
                return self._verdict(key, DROP) == APPLY

    def drops(self, worker: int, attempt: int, step: int) -> None:
        """Say that this server never gets the whole of a push: no other one may apply it."""
        if self.plan.mesh.servers > 1:
            self._verdict(_push(worker, attempt, step), DROP)

    def forget(self, worker: int, attempt: int, step: int) -> None:
        """Remove what the store has of a push that every server has answered."""
        if step >= 0 and self.plan.mesh.servers > 1:
            key = _push(worker, attempt, step)
            for name in ("whole", "verdict"):
                self.store.delete_key(f"{key}/{name}")

    def _verdict(self, key: str, wanted: str) -> str:
        """Write a verdict unless there is one; return the one that counts."""
        return self.store.compare_set(f"{key}/verdict", "", wanted).decode()

    def _meet(self, worker: int, server: int, attempt: int) -> Pair:
        place = PrefixStore(f"pair/{worker}/{server}/{attempt}", self.store)
        return Pair(SERVERS_AXIS, (worker, server), self.recorder, place, self.message_s)


def _open(server: int) -> str:
    return f"open/{server}"


def _here(worker: int) -> str:
    return f"here/{worker}"


def _push(worker: int, attempt: int, step: int) -> str:
    return f"push/{worker}/{attempt}/{step}"
