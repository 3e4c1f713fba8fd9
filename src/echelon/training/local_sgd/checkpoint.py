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
from typing import Any, cast

from echelon.launch.process_group import Store
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import ExchangeBroken, ObjectCommunicator
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex
from echelon.training.steps.part import NamedShards, ShardsByKind

OPTIMIZER = "optimizer."
"""How kinds of the optimizer's state begin."""

OUTER_PARAMETERS = "outer.parameters"
"""The kind of the parameters that islands agree on, before it is written."""

ISLANDS_KEY = "islands"
"""Where a state says the position of each island."""


def islands_state(
    own: ShardsByKind, outer: ShardsByKind, island: int, *, is_first: bool
) -> ShardsByKind:
    """Return what an island writes: its `own` tensors, and the `outer` ones that all agree on.

    The first island writes those.
    """
    agreed = {
        PARAMETERS if kind == OUTER_PARAMETERS else kind: _of_first(shards, is_first)
        for kind, shards in outer.items()
    }
    # Who reads a model without its islands takes the routers' biases of the first.
    parts = {
        kind: shards
        for kind, shards in own.items()
        if is_first and kind != PARAMETERS and not kind.startswith(OPTIMIZER)
    }
    return {
        **agreed,
        **parts,
        **{f"island-{island}.{kind}": shards for kind, shards in own.items()},
    }


def told_position(position: Mapping[str, Any], groups: RankGroups) -> Mapping[str, Any]:
    """Return where the engines of all islands stand, the same on every rank."""
    if groups.islands.size == 1:
        return position
    return {ISLANDS_KEY: groups.islands.gather_objects(dict(position))}


def positions_told(
    position: Mapping[str, Any], groups: RankGroups, exchange: ObjectCommunicator
) -> Mapping[str, Any]:
    """Return where the engines of those islands stand that write a checkpoint; None of others."""
    said = dict(exchange.gather_objects((groups.islands.index, dict(position))))
    return {ISLANDS_KEY: [said.get(island) for island in range(groups.islands.size)]}


def held_in(state: ShardsByKind, index: CheckpointIndex) -> ShardsByKind:
    """Return the tensors to read from a checkpoint: all, or what islands agreed on alone.

    That is where the island of this rank was not there when it was written.
    """
    missing = {kind.split(".")[0] for kind in state if kind.startswith("island-")}
    missing -= {kind.split(".")[0] for kind in index.tensors}
    return {kind: shards for kind, shards in state.items() if kind.split(".")[0] not in missing}


def position_of(told: Any, groups: RankGroups) -> Any:
    """Return where the engine of this island stood; what is no such thing is returned as it is."""
    if groups.islands.size == 1 or not isinstance(told, dict):
        return told
    found = cast("dict[str, Any]", told).get(ISLANDS_KEY)
    if not isinstance(found, list) or len(cast("list[Any]", found)) != groups.islands.size:
        return {}
    return cast("list[Any]", found)[groups.islands.index]


def _of_first(shards: Mapping[str, list[Shard]], is_first: bool) -> NamedShards:
    """Return shards of which those of the first island are written: all hold the same."""
    return {
        name: [replace(one, primary=one.primary and is_first) for one in held]
        for name, held in shards.items()
    }


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
