# SPDX-License-Identifier: Apache-2.0
"""A worker of parameter servers: it holds parameters and gradients, and no optimizer state.

Split: every bucket into a range for each server (`layout/slots.py`); samples over workers.
Sent:  the range of each server as soon as backward has filled its bucket; after the update each
       server sends its range of the parameters back.
Bytes: `server_bytes` in `cost/bytes/servers.py`.
Must divide: microbatch_sequences x workers | global_sequences.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.

A server posts its receives in the order of buckets, so a worker pushes them in that order: one that
is full before its turn waits for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from echelon.core.plan import Plan
from echelon.layout.buckets import stage_units
from echelon.layout.slots import plan_server_ranges
from echelon.layout.stage import RankPart
from echelon.models.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.parallel.data import MAX_IN_FLIGHT, GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.zero import ParameterGathering


class GradientPush(GradientReduction):
    """Send the buckets of a worker to the servers, each range to the one that holds it."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
        """Start with nothing under way."""
        super().__init__(plan, groups)
        self._servers, self._first = groups.servers, plan.mesh.num_workers
        self._ranges = plan_server_ranges(plan)
        self._full: dict[int, Bucket] = {}
        self._next = 0
        self._pushes: deque[Pending] = deque()

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Push a bucket whose last gradient has just been written, and those that waited for it."""
        assert last, "gradients of microbatches add up whole"
        self._full[bucket.index] = bucket
        while self._next in self._full:
            self._pushes.append(self._push(self._full.pop(self._next)))
            self._next += 1
        # What is sent in another dtype is a copy, and few of them are there at a time.
        while self._copies and len(self._pushes) > MAX_IN_FLIGHT:
            self._pushes.popleft().wait()

    def start_step(self) -> None:
        """Begin with the first bucket."""
        super().start_step()
        self._next = 0

    def finish(self) -> None:
        """Return when everything is sent: gradients may be written again."""
        assert not self._full, "every bucket was full, so each had its turn"
        for pending in self._pushes:
            pending.wait()
        self._pushes.clear()

    def _push(self, bucket: Bucket) -> Pending:
        whole = bucket.gradients.to(self._dtype)  # itself, where the dtype is the same
        sends = {
            self._first + server: whole[part.start : part.stop]
            for server, part in enumerate(self._ranges[bucket.index])
            if part
        }
        return self._servers.exchange(sends, {}, name=f"gradients.{bucket.name}")


class PulledParameters(ParameterGathering):
    """Parameters of a worker: whole at all times, and new after every update of the servers."""

    def __init__(
        self,
        plan: Plan,
        part: RankPart,
        buckets: Sequence[Bucket],
        groups: RankGroups,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Hold the parameters of `buckets`: whole, so that no `pieces` are needed."""
        units = [stage_units(one) for one in part.stages]
        shards = groups.shard, groups.expert_shard
        super().__init__(buckets, units, shards, plan.layout.zero)
        self._servers, self._first = groups.servers, plan.mesh.num_workers
        self._ranges, self._all = plan_server_ranges(plan), buckets

    def end_update(self) -> None:
        """Receive all parameters from the servers, and return when they are there."""
        pulls: list[Pending] = []
        for bucket in self._all[::-1]:
            receives: dict[int, torch.Tensor] = {
                self._first + server: bucket.values[part.start : part.stop]
                for server, part in enumerate(self._ranges[bucket.index])
                if part
            }
            pulls.append(self._servers.exchange({}, receives, name=f"parameters.{bucket.name}"))
        for pending in pulls:
            pending.wait()
