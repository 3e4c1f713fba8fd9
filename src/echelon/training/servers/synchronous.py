# SPDX-License-Identifier: Apache-2.0
"""Synchronous parameter servers: the step of `training/engine.py`, on two kinds of rank.

A worker computes gradients and updates nothing; a server holds its ranges of all buckets and
updates those alone. Both hear of the tokens, the norm and the loss with all other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from echelon.models.batch import TokenBatch
from echelon.parallel.rank_model import GradientExchange, RankModel
from echelon.parallel.servers import GradientPush, PulledParameters, server_model
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import server_shards
from echelon.parallel.transport.collectives import Group
from echelon.training.engine import TrainEngine
from echelon.training.steps.part import NamedShards


class ServedWorker(TrainEngine):
    """Compute the gradients of a worker, and take the parameters that servers send."""

    updates: ClassVar[bool] = False
    exchange: ClassVar[GradientExchange] = GradientExchange(
        reduction=GradientPush, gathering=PulledParameters
    )

    @property
    def readers(self) -> Group:
        """All workers, and the servers."""
        return self.groups.servers


class ParameterServer(TrainEngine):
    """Hold the ranges of a server, and update them with the sums of all workers' gradients."""

    computes: ClassVar[bool] = False

    @property
    def readers(self) -> Group:
        """All workers, and the servers."""
        return self.groups.servers

    def _build(self, *, initial: bool) -> RankModel:
        return server_model(
            self.plan, self.groups, self.device, pieces=self.pieces, initial=initial
        )

    def _counts(self, bucket: Bucket) -> bool:
        return True

    def _run(self, batches: Sequence[TokenBatch], scale: float) -> Mapping[int, torch.Tensor]:
        return {}

    def parameters(self) -> NamedShards:
        """Return the ranges, as copies of the workers' parameters."""
        self.model.gathering.settle()
        buckets = self.model.buckets
        values = [one.value_slice for one in buckets]
        return server_shards(buckets, values, self.groups, primary=False)

    def masters(self) -> NamedShards:
        """Return the values that the optimizer updates."""
        if self.plan.mathematics.precision.has_master:
            return super().masters()
        return self._shards({one.name: one.value_slice for one in self.model.buckets})

    def shared_state(self) -> NamedShards:
        """Return nothing: no other rank holds a range."""
        return {}

    def refresh(self, *, slices: bool = True) -> None:
        """Take over values that were written from outside, and send them to the workers."""
        del slices
        super().refresh(slices=True)

    def _shards(self, flats: Mapping[str, torch.Tensor]) -> NamedShards:
        held = [bucket for bucket in self.model.buckets if bucket.name in flats]
        tensors = [flats[bucket.name] for bucket in held]
        return server_shards(held, tensors, self.groups, primary=True)
