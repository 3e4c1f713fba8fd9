# SPDX-License-Identifier: Apache-2.0
"""The order of an update: which bucket when, what is read ahead, what is written behind.

Buckets are updated in the order of the next forward pass. Those of Muon take three jobs; a few of
them are on their way at a time, so that messages travel while other matrices are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.models.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.parallel.offload import OffloadStore, PendingFetch
from echelon.parallel.storage.buckets import Bucket

UpdateTaskKind = Literal["elements", "send", "orthogonalise", "apply"]


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
