# SPDX-License-Identifier: Apache-2.0
"""The update of a rank's slices: whatever the ZeRO stage, the optimizer, and where state rests.

Every rank updates its slice of each bucket: all of it at stage 0. The values that are updated are
the parameters themselves or, where the plan keeps them in another dtype, a master copy. Buckets are
updated in the order of the next forward pass. Those of Muon take three tasks; a few of them are on
their way at a time, so that messages travel while other matrices are computed.

In the gradient norm every logical parameter counts once: ranks that hold other slices, tensor
slices or stages add up what each gives here. What counts elsewhere adds nothing, unless it is not
finite: a copy that is NaN on one rank alone must stop the update of all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.registry import load_reference
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Optimizer, OptimizerKind, Plan
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of
from echelon.models.precision import TORCH_DTYPES, at_least_fp32
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.offload import OffloadPlace, OffloadStore, PendingFetch
from echelon.parallel.storage.buckets import Bucket
from echelon.training.optimizer.muon import Muon, MuonGroup
from echelon.training.optimizer.trained_ranges import (
    ElementRule,
    UpdateSlices,
    trained_ranges,
    update_elements,
)

MASTER = "master"
"""The kind of state that is the copy of the parameters which the optimizer updates."""

UpdateTaskKind = Literal["elements", "send", "orthogonalise", "apply"]


class SliceOptimizer:
    """Update the slices of a rank with the optimizer of the plan, fused."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        plan: Plan,
        *,
        groups: RankGroups,
        device: torch.device,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Reserve the state of `buckets`; the ranks of a stage do so together."""
        settings, precision = plan.mathematics.optimizer, plan.mathematics.precision
        zero = plan.layout.zero
        place = OffloadPlace(
            target=zero.optimizer_offload,
            folder=Path(zero.offload_dir),
            rank=groups.rank,
            num_buffers=zero.offload_buffers,
            chunk_bytes=pieces.file_bytes,
        )
        self.store = groups.completion.offload_store(place, device)
        self._pieces = pieces
        self._one_pass = plan.layout.kernels.of("update") != "plain"
        self._buckets, self._settings = buckets, settings
        self._has_master, self._dtype = precision.has_master, TORCH_DTYPES[precision.master]
        self._rules: Mapping[OptimizerKind, ElementRule] = {
            rule: load_reference(OPTIMIZERS[rule].runner)(settings)
            for rule in dict.fromkeys(bucket.plan.update for bucket in buckets)
            if not OPTIMIZERS[rule].needs_whole_matrices
        }
        self._ranges = {bucket.name: trained_ranges(bucket) for bucket in buckets}
        self._num_steps = 0
        matrices = [
            bucket for bucket in buckets if OPTIMIZERS[bucket.plan.update].needs_whole_matrices
        ]
        if matrices:
            share = expert_index_of(plan, groups.rank)
            exchange = muon_exchange(plan, pp_rank_of(plan, groups.rank), share)
            first = groups.recorder.rank - groups.rank
            links = MuonGroup(group=groups.stage, exchange=exchange, first_rank=first)
            self._muon: Muon = load_reference(OPTIMIZERS[settings.kind].runner)(
                settings, links, matrices
            )
        for bucket in buckets:
            for kind in self._kinds(bucket):
                self.store.add(_key(bucket, kind), bucket.value_slice.numel(), self._dtype)

    def set_num_steps(self, num_steps: int) -> None:
        """Say how many updates the state has seen (it is filled in place through `state`)."""
        self._num_steps = num_steps

    def update(
        self, learning_rate: float, factor: float, updated: Callable[[Bucket], None]
    ) -> None:
        """Update the parameters from the gradients times `factor`.

        `updated` is called with each bucket once its slice has its new values. Gradients are
        multiplied in place, unless they are cast or the update is one pass.
        """
        self._num_steps += 1
        for rule in self._rules.values():
            rule.start_update(self._num_steps)
        run_update_tasks(self._tasks(learning_rate, factor, updated))

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return kind -> name of bucket -> slice, as views; "master" is among the kinds."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for bucket in self._buckets:
            for kind in self._kinds(bucket):
                found.setdefault(kind, {})[bucket.name] = self.store.view(_key(bucket, kind))
        return found

    def _kinds(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the kinds of state that a bucket has: none where all of it is frozen."""
        if not any(slot.parameter.requires_grad for slot in bucket.slots):
            return ()
        return (*OPTIMIZERS[bucket.plan.update].state, *((MASTER,) if self._has_master else ()))

    def _tasks(
        self, rate: float, factor: float, updated: Callable[[Bucket], None]
    ) -> Iterator[UpdateTask]:
        trained = [bucket for bucket in self._buckets[::-1] if self._kinds(bucket)]
        for kind, bucket in update_order(trained, self._pieces):
            if kind == "elements":
                yield UpdateTask(
                    tensors=self._wants(bucket, OPTIMIZERS[bucket.plan.update].state),
                    run=partial(self._elements, bucket, rate, factor),
                    done=partial(updated, bucket),
                )
            elif kind == "send":
                momentum = StoredTensorRequest(store=self.store, keys=(_key(bucket, "momentum"),))
                yield UpdateTask(tensors=[momentum], run=partial(self._send, bucket, factor))
            elif kind == "orthogonalise":
                yield UpdateTask(tensors=[], run=partial(self._orthogonalise, bucket))
            else:
                yield UpdateTask(
                    tensors=self._wants(bucket, ()),
                    run=partial(self._apply, bucket, rate),
                    done=partial(updated, bucket),
                )

    def _wants(self, bucket: Bucket, kinds: tuple[str, ...]) -> list[StoredTensorRequest]:
        """Return state of some kinds, the master copy and the values, but for what is at hand."""
        kinds = (*kinds, *((MASTER,) if self._has_master else ()))
        wants: list[StoredTensorRequest] = []
        if kinds:
            wants.append(
                StoredTensorRequest(
                    store=self.store, keys=tuple(_key(bucket, kind) for kind in kinds)
                )
            )
        if bucket.offload_store is not None:
            read = not self._has_master
            wants.append(
                StoredTensorRequest(
                    store=bucket.offload_store, keys=(bucket.values_key,), read=read
                )
            )
        return wants

    def _elements(
        self, bucket: Bucket, rate: float, factor: float, tensors: list[torch.Tensor]
    ) -> None:
        num_state = len(OPTIMIZERS[bucket.plan.update].state)
        target, values = self._target(bucket, tensors[num_state:])
        update_elements(
            self._rules[bucket.plan.update],
            UpdateSlices(
                gradient=bucket.gradient_slice,
                values=values,
                target=target,
                state=tensors[:num_state],
                scratch=bucket.offload_store is not None,
                pieces=self._pieces,
                one_pass=self._one_pass,
            ),
            self._ranges[bucket.name],
            rate=rate,
            factor=factor,
            weight_decay=self._settings.weight_decay,
        )

    def _send(self, bucket: Bucket, factor: float, tensors: list[torch.Tensor]) -> None:
        (momentum,) = tensors
        self._muon.send_parts(bucket, bucket.gradient_slice, momentum, factor)

    def _orthogonalise(self, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
        assert not tensors, "only messages are read"
        self._muon.orthogonalise(bucket)

    def _apply(self, bucket: Bucket, rate: float, tensors: list[torch.Tensor]) -> None:
        target, values = self._target(bucket, tensors)
        self._muon.apply(bucket, target, rate)
        if target is not values:
            values.copy_(target)

    def _target(
        self, bucket: Bucket, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is updated (master copy or values) and the values, of what was fetched."""
        values = bucket.value_slice if bucket.offload_store is None else tensors[-1]
        return (tensors[0] if self._has_master else values), values


def _key(bucket: Bucket, kind: str) -> str:
    return f"{bucket.name}.{kind}"


def local_norm_squared(
    buckets: Sequence[Bucket],
    counts: Callable[[Bucket], bool] = lambda bucket: True,
    *,
    run_elements: int = TRAINING_PIECES.norm_elements,
) -> float:
    """Return the sum of squares of the gradients that count in the slices of this rank.

    `counts` says of a bucket whether this rank counts for all that hold the same.
    Runs of `run_elements` (on a CPU) are added in the gradient's own precision (at least float32),
    the runs in float64; what is not finite stays so. A GPU copies no gradient to add it up wider
    than it is, a CPU one run at a time. The host waits for the device.
    """
    return float(sum_of_squares(buckets, counts, run_elements=run_elements))


def sum_of_squares(
    buckets: Sequence[Bucket],
    counts: Callable[[Bucket], bool],
    *,
    run_elements: int,
) -> torch.Tensor:
    """Return what `local_norm_squared` does as a float64 number on the device."""
    mine: list[torch.Tensor] = []
    elsewhere: list[torch.Tensor] = []
    for bucket in buckets:
        counted = bucket.counted_ranges() if counts(bucket) else []
        mine.extend(_runs(bucket, counted, run_elements))
        others = ranges_between(counted, bucket.slots[-1].end)
        elsewhere.extend(_runs(bucket, others, run_elements))
    if elsewhere:
        nothing = _squares(elsewhere) * 0.0
        return _squares(mine) + nothing if mine else nothing
    if mine:
        return _squares(mine)
    device = buckets[0].gradient_slice.device if buckets else None
    return torch.zeros((), dtype=torch.float64, device=device)


def _squares(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of some runs, each added up in at least float32, as a float64.

    A kernel of a GPU widens what it reads and writes nothing else; a CPU widens one run at a time.
    """
    wide = at_least_fp32(runs[0].dtype)
    if runs[0].device.type == "cpu":
        return (
            torch.stack([torch.dot(one, one) for one in (run.to(wide) for run in runs)])
            .double()
            .sum()
        )
    norms = [torch.linalg.vector_norm(run, dtype=wide) for run in runs]
    return torch.stack(norms).double().square().sum()


def ranges_between(ranges: Sequence[slice], end: int) -> list[slice]:
    """Return what of the elements before `end` is in none of `ranges`, which are in order."""
    starts = [0, *(part.stop for part in ranges)]
    stops = [*(part.start for part in ranges), end]
    return [slice(a, b) for a, b in zip(starts, stops, strict=True) if b > a]


def _runs(bucket: Bucket, parts: Sequence[slice], elements: int) -> Iterator[torch.Tensor]:
    gradient = bucket.gradient_slice
    # Runs as long as a cache on CPU; on a GPU fewer and longer ones, whose sums are trees.
    length = elements if gradient.device.type == "cpu" else 256 * elements
    for part in parts:
        for run in gradient[bucket.within_own_slice(part)].split(length):
            if run.numel():
                yield run


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0).

    The last of `warmup_steps` has the whole rate; the decay reaches `final_ratio` of it at
    `total_steps`, the first step that is not taken. "wsd" (warm-up, stable, decay: Hu et al.,
    MiniCPM, 2024) falls linearly over the last `decay_steps` only.
    """
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    return peak * _decay(optimizer, step)


def _decay(optimizer: Optimizer, step: int) -> float:
    final, end = optimizer.final_ratio, optimizer.total_steps
    if optimizer.schedule == "constant":
        return 1.0
    stable = optimizer.schedule == "wsd"
    start = end - optimizer.decay_steps if stable else optimizer.warmup_steps
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, end - start))
    if optimizer.schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0 - (1 - final) * progress


def update_order(
    buckets: Iterable[Bucket], pieces: PieceSizes = TRAINING_PIECES
) -> Iterator[tuple[UpdateTaskKind, Bucket]]:
    """Yield the jobs of an update of `buckets`: the same on every rank that holds them."""
    buckets = list(buckets)
    unsent = deque(
        bucket for bucket in buckets if OPTIMIZERS[bucket.plan.update].needs_whole_matrices
    )
    for _ in range(min(pieces.muon_buckets, len(unsent))):
        yield "send", unsent.popleft()
    results: deque[Bucket] = deque()
    for bucket in buckets:
        if not OPTIMIZERS[bucket.plan.update].needs_whole_matrices:
            yield "elements", bucket
            continue
        yield "orthogonalise", bucket
        results.append(bucket)
        if len(results) > pieces.muon_results:
            yield "apply", results.popleft()
            if unsent:
                yield "send", unsent.popleft()
    for bucket in results:
        yield "apply", bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensorRequest:
    """Name tensors that a job changes: where they rest, and whether their content is read."""

    store: OffloadStore
    keys: tuple[str, ...]
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTask:
    """Something to do with tensors that are fetched before and put back after; `done` ends it."""

    tensors: Sequence[StoredTensorRequest]
    run: Callable[[list[torch.Tensor]], None]
    done: Callable[[], None] | None = None


def run_update_tasks(jobs: Iterable[UpdateTask]) -> None:
    """Run jobs one after the other; what the next one wants is fetched while one runs."""
    ahead: deque[tuple[UpdateTask, list[PendingFetch]]] = deque()
    for job in jobs:
        ahead.append((job, [one.store.fetch(one.keys, read=one.read) for one in job.tensors]))
        if len(ahead) > 1:
            _run(*ahead.popleft())
    for job, fetched in ahead:
        _run(job, fetched)


def _run(job: UpdateTask, fetched: Sequence[PendingFetch]) -> None:
    sets = [one.wait() for one in fetched]
    job.run([tensor for tensors in sets for tensor in tensors])
    for want, tensors in zip(job.tensors, sets, strict=True):
        want.store.put(want.keys, tensors)
    if job.done is not None:
        job.done()
