# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a run with islands of local SGD, and how those that write it talk.

Without islands: the values that the optimizer updates ("parameters"), its state, and that of
routers. With them "parameters" are what all islands agreed on last: what is exported, and what
text is written with. Beside them are the outer momentum and sums that have not been applied yet,
and of each island, under "island-I.", all that a run has without islands. So a run goes on with
the same bits in the middle of a round, too. Where islands may be lost, those that met write it, at
the end of a round; one that is not in it begins from what islands agreed on when it resumes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from echelon.launch.process_group import Store
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import ExchangeBroken, ObjectCommunicator
from echelon.training.checkpoint.index import INDEX_FILE, PARAMETERS, read_index
from echelon.training.steps.part import CheckpointScope, NamedShards, ShardsByKind

OPTIMIZER = "optimizer."
"""How kinds of the optimizer's state begin."""

OUTER_PARAMETERS = "outer.parameters"
"""The kind of the parameters that islands agree on, before it is written."""

ISLANDS_KEY = "islands"
"""Where a state says the position of each island."""


class IslandCheckpoint(CheckpointScope):
    """Checkpoints of a run with islands: each adds its own state; the first writes the outer."""

    first_saving = 0
    """The first island of those that write."""

    def __init__(
        self,
        groups: RankGroups,
        outer: Callable[[], ShardsByKind],
        take_back: Callable[[], None],
    ) -> None:
        """`outer` gives the outer state; `take_back` lets the island go on from it."""
        self._islands, self._outer, self._take_back = groups.islands, outer, take_back

    def state(self, own: ShardsByKind) -> ShardsByKind:
        """Outer state, which all islands agree on, and the `own` tensors of this island."""
        island = self._islands.index
        is_first = island == self.first_saving
        agreed = {
            PARAMETERS if kind == OUTER_PARAMETERS else kind: _of_first(shards, is_first)
            for kind, shards in self._outer().items()
        }
        # A reader of a model without its islands takes the routers' biases of the first.
        parts = {
            kind: shards
            for kind, shards in own.items()
            if is_first and kind != PARAMETERS and not kind.startswith(OPTIMIZER)
        }
        islands = {f"island-{island}.{kind}": shards for kind, shards in own.items()}
        return {**agreed, **parts, **islands}

    def position(self, own: Mapping[str, Any], exchange: ObjectCommunicator) -> Mapping[str, Any]:
        """Positions of all islands."""
        del exchange
        return {ISLANDS_KEY: self._islands.gather_objects(dict(own))}

    def within(self, state: ShardsByKind, path: Path) -> ShardsByKind:
        """All tensors, or the outer state alone if this island did not write the checkpoint."""
        # `load_checkpoint` tells of a file that cannot be read, on all ranks.
        if not (path / INDEX_FILE).is_file():
            return state
        missing = {kind.split(".")[0] for kind in state if kind.startswith("island-")}
        missing -= {kind.split(".")[0] for kind in read_index(path).tensors}
        return {kind: shards for kind, shards in state.items() if kind.split(".")[0] not in missing}

    def position_of(self, stored: Any) -> Any:
        """Position of this island; empty if a checkpoint has another number of islands."""
        if not isinstance(stored, dict):
            return stored
        positions = cast("dict[str, Any]", stored).get(ISLANDS_KEY)
        if not isinstance(positions, list):
            return {}
        by_island = cast("list[Any]", positions)
        return by_island[self._islands.index] if len(by_island) == self._islands.size else {}

    def take_back(self) -> None:
        """Go on from the outer parameters."""
        self._take_back()


def _of_first(shards: Mapping[str, list[Shard]], is_first: bool) -> NamedShards:
    """Shards of which the first island writes its own: all hold the same."""
    return {
        name: [replace(one, primary=one.primary and is_first) for one in held]
        for name, held in shards.items()
    }


class ElasticIslandCheckpoint(IslandCheckpoint):
    """Checkpoints of islands that may be lost: those that met last write one."""

    def __init__(
        self,
        groups: RankGroups,
        outer: Callable[[], ShardsByKind],
        take_back: Callable[[], None],
        writers: Callable[[int], tuple[int, ObjectCommunicator]],
    ) -> None:
        """`writers` gives the first island that writes in an attempt, and the ranks that do."""
        super().__init__(groups, outer, take_back)
        self._writers = writers

    def exchange(self, attempt: int) -> ObjectCommunicator:
        """Ranks of the islands that met last; of those that are left, in a later `attempt`."""
        self.first_saving, exchange = self._writers(attempt)
        return exchange

    def position(self, own: Mapping[str, Any], exchange: ObjectCommunicator) -> Mapping[str, Any]:
        """Positions of the islands that write; None of others."""
        by_island = dict(exchange.gather_objects((self._islands.index, dict(own))))
        return {ISLANDS_KEY: [by_island.get(island) for island in range(self._islands.size)]}


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
