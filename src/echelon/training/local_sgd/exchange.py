# SPDX-License-Identifier: Apache-2.0
"""What objects the ranks of several islands tell each other through the store: for checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from echelon.launch.process_group import Store
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import ExchangeBroken

ASKS_FOR_S = 0.5
"""Seconds for which the store is asked for an object before losses are looked at."""


class StoreExchange:
    """Gather objects of some ranks of a run (an `ObjectCommunicator` of checkpoints)."""

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        recorder: Recorder,
        is_lost: Callable[[int], bool],
    ) -> None:
        """Gather over `ranks`, one of which is `rank`, in a `store` that nobody used before.

        `is_lost` says whether a rank will never come.
        """
        self.index, self.size = list(ranks).index(rank), len(ranks)
        self._store, self._ranks, self._recorder, self._is_lost = store, ranks, recorder, is_lost
        self._number = 0

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in their order; ExchangeBroken where one never does."""
        number, self._number = self._number, self._number + 1
        self._store.set(_key(number, self.index), pickle.dumps(value).hex())
        if number > 1:
            # Everybody has read what was told two times before: it told something after it.
            self._store.delete_key(_key(number - 2, self.index))
        with self._recorder.waiting("what ranks of other islands tell"):
            return [self._told(number, index) for index in range(self.size)]

    def _told(self, number: int, index: int) -> Any:
        key = _key(number, index)
        while True:
            with suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=ASKS_FOR_S))
                return pickle.loads(bytes.fromhex(self._store.get(key).decode("ascii")))
            if self._is_lost(self._ranks[index]) and not self._store.check([key]):
                raise ExchangeBroken(f"rank {self._ranks[index]} is lost")


def _key(number: int, index: int) -> str:
    return f"{number}/{index}"
