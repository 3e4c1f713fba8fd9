# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a run, with islands of local SGD or without.

Without islands: the values that the optimizer updates ("parameters"), its state, and that of
routers. With them "parameters" are what all islands agreed on last: what is exported, and what
text is written with. Beside them are the outer momentum and sums that have not been applied yet,
and of each island, under "island-I.", all that a run has without islands. So a run goes on with
the same bits in the middle of a round, too. Where islands may be lost, those that met write it, at
the end of a round; one that is not in it begins from what islands agreed on when it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from echelon.parallel.transport.device_mesh import RankGroups
from echelon.parallel.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex
from echelon.training.engine import TrainEngine
from echelon.training.local_sgd.outer_steps import PARAMETERS as OUTER_PARAMETERS

CheckpointState = Mapping[str, Mapping[str, list[Shard]]]
"""Shards by kind, then by canonical name."""

ISLANDS_KEY = "islands"
"""Where a state says the position of each island."""


def checkpoint_state(engine: TrainEngine, first: int = 0) -> CheckpointState:
    """Return the tensors of a rank that the next step depends on, as views.

    Island `first` writes what all of them hold.
    """
    kinds = {f"optimizer.{kind}": shards for kind, shards in engine.state().items()}
    own = {PARAMETERS: engine.masters(), **kinds, **engine.expert_state()}
    if engine.outer is None:
        return own
    island = engine.groups.islands.index
    agreed = {
        PARAMETERS if kind == OUTER_PARAMETERS else kind: _of_first(shards, island == first)
        for kind, shards in engine.outer_state().items()
    }
    # Who reads a model without its islands takes the routers' biases of the first.
    routers = engine.expert_state() if island == first else {}
    return {
        **agreed,
        **routers,
        **{f"island-{island}.{kind}": shards for kind, shards in own.items()},
    }


def shared_state(engine: TrainEngine) -> dict[str, list[Shard]]:
    """Return what ranks that hold the same must agree on: within an island, and what islands share.

    What is of one island is called so.
    """
    # A parameter server holds pieces of its own.
    held = {} if engine.is_server else dict(engine.parameters())
    for shards in engine.expert_state().values():
        held |= shards
    if engine.outer is None:
        return held
    island = engine.groups.islands.index
    agreed = {
        f"{kind} {name}": one
        for kind, shards in engine.outer_state().items()
        for name, one in shards.items()
    }
    return {**agreed, **{f"island {island}: {name}": one for name, one in held.items()}}


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


def held_in(state: CheckpointState, index: CheckpointIndex) -> CheckpointState:
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


def _of_first(shards: Mapping[str, list[Shard]], is_first: bool) -> dict[str, list[Shard]]:
    """Return shards of which those of the first island are written: all hold the same."""
    return {
        name: [replace(one, primary=one.primary and is_first) for one in held]
        for name, held in shards.items()
    }
