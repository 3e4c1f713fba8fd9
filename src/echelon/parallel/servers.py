# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: workers send gradients and get parameters, servers keep and update the model.

A worker holds parameters and gradients, and no optimizer state; a server has its range of every
bucket, with the optimizer state of that range alone (`layout/slots.py`).

Split: every bucket into a range for each server (`layout/slots.py`); samples over workers.
Sent:  the range of each server as soon as backward has filled its bucket; after the update each
       server sends its range of the parameters back.
Bytes: `server_bytes` in `cost/bytes/servers.py`.
Must divide: microbatch_sequences x workers | global_sequences.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.

A server adds pushes in the order of workers, so a run gives the same bits every time. The sum is
the gradient of the mean loss of the global batch: losses are divided by its tokens before backward,
and nothing here divides by a number of workers.

A server posts its receives in the order of buckets, so a worker pushes them in that order: one that
is full before its turn waits for those before it.

An asynchronous worker and a server talk over a link of their own:

    worker -> server    begin: step, version that it has, tokens of the step   3 numbers
                        the range of each bucket, as backward fills it
                        end: loss, squared norm, when the run is to stop       3 numbers
    server -> worker    version, loss, when the run is to stop                 3 numbers
                        the range of each bucket

Between two steps a worker may ask for the parameters as they are: `begin` says so. The server
answers as it answers a push.

A pair has a communicator of its own, so that a server waits for each worker in a thread of its own,
and a worker that is lost breaks its own links only. A worker that leaves says so in `begin`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan, stage_units
from echelon.layout.slots import plan_server_ranges, served_buckets, server_of_rank, slot_ranges
from echelon.layout.stage import RankPart, decays, held_parameters, part_of
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.data import MAX_IN_FLIGHT, GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.pipeline import PipelineExecutor, StreamShape
from echelon.parallel.rank_model import RankModel
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.weights import fill_initial
from echelon.parallel.tensor_memory import OwnedTensorMemory
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.zero import ParameterGathering


class GradientPush(GradientReduction):
    """Send the buckets of a worker to the servers, each range to the one that holds it."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
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


WORKER = 0
"""The place of a worker in a pair."""

SERVER = 1
"""The place of a server in a pair."""

NUMBERS = 3
"""Numbers, float64, of `begin`, of `end` and of what a server says beside its ranges."""

BEGIN = 0
"""The tag of the numbers with which a step begins."""

END = 1
"""The tag of those with which it ends, and of an answer."""

FIRST_BUCKET = 2
"""The tag of the first bucket; others follow in their order."""

ASKS_TO_STOP = -1
"""What stands for the step to stop after where a worker asks to: the first server says which."""

LEAVES = -1.0
"""The step of a worker that says that none follows."""

ASKS_FOR_PARAMETERS = -2.0
"""The step of a worker that pushes nothing, and asks for the newest parameters."""


def send_numbers(pair: Group, to: int, tag: int, *numbers: float) -> Pending:
    """Start to send a few numbers to the other end."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return pair.send(values, to, name="numbers", tag=tag)


def receive_numbers(pair: Group, sender: int, tag: int) -> list[float]:
    """Return a few numbers of the other end, once they have come."""
    values = torch.empty(NUMBERS, dtype=torch.float64)
    pair.receive(values, sender, name="numbers", tag=tag).wait()
    return values.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Say what a server answers a push: its version, the loss, after which step to stop (or 0)."""

    version: int
    loss: float
    stop_after: int


class WorkerMessages(GradientPush):
    """The messages of one worker: it pushes buckets as they fill, and pulls when it has ended."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
        super().__init__(plan, groups)
        pairs = groups.server_links.pairs
        self.pairs: Sequence[Group] = [pairs[rank] for rank in plan.mesh.server_ranks]
        self.versions = [0] * plan.mesh.servers
        self.started = False

    def begin(self, step: int, tokens: int) -> None:
        """Tell every server which step begins here, and with which of its versions."""
        self.started = True
        for pair, version in zip(self.pairs, self.versions, strict=True):
            send_numbers(pair, SERVER, BEGIN, step, version, tokens).wait()

    def end(self, loss: float, norm_squared: float, stop_after: int) -> None:
        """Tell every server that all gradients of the step are under way."""
        for pair in self.pairs:
            send_numbers(pair, SERVER, END, loss, norm_squared, stop_after).wait()

    def pull_newest(self, buckets: Sequence[Bucket], num_steps: int) -> None:
        """Pull the parameters as they are when every worker has done so many steps.

        Before the first step of a run a worker has them already.
        """
        if self.started:
            for pair in self.pairs:
                send_numbers(pair, SERVER, BEGIN, ASKS_FOR_PARAMETERS, num_steps, 0.0).wait()
            self.pull(buckets)

    def pull(self, buckets: Sequence[Bucket]) -> list[Reply]:
        """Return what each server answers, its range of every bucket being in its place."""
        found: list[Reply] = []
        arriving: list[Pending] = []
        for server, pair in enumerate(self.pairs):
            for bucket in buckets:
                part = self._ranges[bucket.index][server]
                if part:
                    arriving.append(
                        pair.receive(
                            bucket.values[part.start : part.stop],
                            SERVER,
                            name=f"parameters.{bucket.name}",
                            tag=FIRST_BUCKET + bucket.index,
                        )
                    )
        for server, pair in enumerate(self.pairs):
            version, loss, stop_after = receive_numbers(pair, SERVER, END)
            self.versions[server] = int(version)
            found.append(Reply(version=int(version), loss=loss, stop_after=int(stop_after)))
        for pending in arriving:
            pending.wait()
        return found

    def leave(self) -> None:
        """Tell every server that no step follows; one that is lost need not hear it."""
        if self.started:
            for pair in self.pairs:
                with suppress(RuntimeError):
                    send_numbers(pair, SERVER, BEGIN, LEAVES, 0.0, 0.0).wait()

    def _push(self, bucket: Bucket) -> Pending:
        whole = bucket.gradients.to(self._dtype)  # itself, where the dtype is the same
        sends: list[Pending] = []
        for pair, part in zip(self.pairs, self._ranges[bucket.index], strict=True):
            if part:
                piece = whole[part.start : part.stop]
                tag = FIRST_BUCKET + bucket.index
                sends.append(pair.send(piece, SERVER, name=f"gradients.{bucket.name}", tag=tag))
        return _All(sends, whole)


class _All(Pending):
    """Several messages as one; what they send lives as long."""

    __slots__ = ("_sends", "_sent")

    def __init__(self, sends: Sequence[Pending], sent: torch.Tensor) -> None:
        super().__init__()
        self._sends, self._sent = sends, sent

    def wait(self) -> None:
        """Return when all have left."""
        for pending in self._sends:
            pending.wait()


Received = Sequence[torch.Tensor]
"""What every worker has sent of a bucket, in the order of workers."""


class PushedSums(GradientReduction):
    """Receive the gradients of all workers for the ranges of one server, and add them up."""

    def __init__(self, plan: Plan, groups: RankGroups, buckets: Sequence[Bucket]) -> None:
        super().__init__(plan, groups)
        self._servers, self._buckets = groups.servers, buckets
        self._workers = range(plan.mesh.num_workers)

    def finish(self) -> None:
        """Return when the gradients of this server are the sums over all workers."""
        arriving: deque[tuple[Bucket, Received, Pending]] = deque()
        for bucket in self._buckets:
            arriving.append((bucket, *self._receive(bucket)))
            if len(arriving) > MAX_IN_FLIGHT:
                self._add_up(*arriving.popleft())
        for one in arriving:
            self._add_up(*one)

    def _receive(self, bucket: Bucket) -> tuple[Received, Pending]:
        received = [
            torch.empty_like(bucket.gradient_slice, dtype=self._dtype) for _ in self._workers
        ]
        receives = dict(zip(self._workers, received, strict=True)) if received[0].numel() else {}
        name = f"gradients.{bucket.name}"
        return received, self._servers.exchange({}, receives, name=name)

    def _add_up(self, bucket: Bucket, received: Received, pending: Pending) -> None:
        pending.wait()
        total, *others = received
        for one in others:
            total.add_(one)
        bucket.gradient_slice.copy_(total)


class SentParameters(ParameterGathering):
    """Send the ranges of a server to all workers as soon as they have their new values."""

    def __init__(self, plan: Plan, groups: RankGroups, buckets: Sequence[Bucket]) -> None:
        shards = groups.shard, groups.expert_shard
        super().__init__(buckets, (), shards, plan.layout.zero)
        self._servers, self._workers = groups.servers, range(plan.mesh.num_workers)
        self._sent: list[Pending] = []

    def updated(self, bucket: Bucket) -> None:
        """Send the range of a bucket."""
        values = bucket.value_slice
        sends = dict.fromkeys(self._workers, values) if values.numel() else {}
        self._sent.append(self._servers.exchange(sends, {}, name=f"parameters.{bucket.name}"))

    def end_update(self) -> None:
        """Return when all that was sent has left."""
        self.settle()

    def settle(self) -> None:
        for pending in self._sent:
            pending.wait()
        self._sent.clear()


def server_model(
    plan: Plan,
    groups: RankGroups,
    device: torch.device,
    *,
    pieces: PieceSizes,
    initial: bool = True,
) -> RankModel:
    """Build what a server has of a plan's model: ranges of buckets, and no part that computes.

    It has `initial` weights, or zeros.
    """
    buckets = server_buckets(plan, server_of_rank(plan, groups.rank), device)
    if initial:
        flats = [bucket.value_slice for bucket in buckets]
        fill_initial(buckets, flats, plan, groups, device, pieces)
    reduction = PushedSums(plan, groups, buckets)
    store = GradientStore(reduction, pieces)
    like = torch.empty(0, dtype=TORCH_DTYPES[plan.mathematics.precision.parameters], device=device)
    return RankModel(
        stages={},
        buckets=buckets,
        store=store,
        reduction=reduction,
        gathering=SentParameters(plan, groups, buckets),
        parameter_store=None,
        executor=PipelineExecutor(
            {},
            pp_rank=0,
            groups=groups,
            store=store,
            stream=StreamShape.from_plan(plan, like, scattered=False),
        ),
    )


def server_buckets(plan: Plan, server: int, device: torch.device) -> list[Bucket]:
    """Return the buckets of a server: of each its range of values and gradients, in zeros.

    The whole has no memory here.
    """
    specs = {spec.name: spec for spec in held_parameters(plan, part_of(plan, 0))}
    return [
        _server_bucket(plan, bucket, ranges[server], specs, device)
        for bucket, ranges in zip(served_buckets(plan), plan_server_ranges(plan), strict=True)
    ]


def _server_bucket(
    plan: Plan,
    bucket_plan: BucketPlan,
    own: range,
    specs: dict[str, ParameterSpec],
    device: torch.device,
) -> Bucket:
    precision = plan.mathematics.precision
    # One element in the shape of all: the whole has no memory here.
    values, gradients = (
        torch.empty(1, dtype=TORCH_DTYPES[dtype], device="meta").expand(bucket_plan.num_elements)
        for dtype in (precision.parameters, precision.gradients)
    )
    bucket = Bucket(
        plan=bucket_plan,
        values=values,
        gradients=gradients,
        values_memory=OwnedTensorMemory(torch.empty(0)),
        gradients_memory=OwnedTensorMemory(torch.empty(0)),
        own=slice(own.start, own.stop),
        value_slice=torch.zeros(len(own), dtype=values.dtype, device=device),
        gradient_slice=torch.zeros(len(own), dtype=gradients.dtype, device=device),
    )
    for slot in slot_ranges(plan, bucket_plan, specs):
        place = slice(slot.start, slot.stop)
        bucket.slots.append(
            Slot(
                spec=slot.spec,
                parameter=nn.Parameter(values[place].view(slot.spec.shape)),
                bucket=bucket,
                start=slot.start,
                gradient=gradients[place].view(slot.spec.shape),
                uses=1,
                counted=True,
            )
        )
        if decays(plan.mathematics.optimizer, slot.spec):
            bucket.decay_end = slot.stop
    return bucket
