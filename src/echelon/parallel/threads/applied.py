"""A model on threads: its primary, and other replicas that are built as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.models.piece_sizes import PieceSizes
from echelon.parallel.rank_model import RankModel
from echelon.parallel.threads.replicas import Replica, Replicas, replica_devices, start_thread
from echelon.parallel.threads.stage import SumOntoPrimary, ThreadedExecutor, plan_of_replica
from echelon.parallel.transport.device_mesh import RankGroups, rank_groups
from echelon.parallel.transport.recorder import Recorder

Build = Callable[..., RankModel]
"""`apply_plan`."""


def with_replicas(
    model: RankModel,
    plan: Plan,
    groups: RankGroups,
    device: torch.device,
    pieces: PieceSizes,
    build: Build,
) -> RankModel:
    """Return the model with its replicas on threads, which `build` builds; without any, itself."""
    reduction = model.reduction
    if not isinstance(reduction, SumOntoPrimary):
        return model
    alone, count = plan_of_replica(plan), plan.layout.threads.replicas
    found: list[Replica] = []
    for index, place in enumerate(replica_devices(device, count)):
        here = model
        if index:
            # What it does is told by the primary's recorder.
            its_groups = rank_groups(alone, Recorder(groups.rank, NoEvents()))
            here = build(alone, its_groups, place, pieces=pieces, initial=False)
        (decoder,) = here.stages.values()
        found.append(
            Replica(
                index=index,
                device=place,
                decoder=decoder,
                buckets=here.buckets,
                store=here.store,
                thread=start_thread(index, place, count),
            )
        )
    reduction.replicas = Replicas(found, groups.recorder)
    executor = ThreadedExecutor(model.executor, reduction.replicas)
    return replace(model, executor=executor, replicas=reduction.replicas)
