# SPDX-License-Identifier: Apache-2.0
"""The replicas of a model of ours, and what is copied between them and the primary.

Replicas keep their buckets between steps: what is in them is written over in the next step, by the
parameters of the primary and by the first microbatch's gradients. So a stale replica can only be
one that was not refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from echelon.models.decoder import Decoder
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.threads.workers import ReplicaThreads, num_bytes
from echelon.parallel.transport.recorder import Recorder

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Hold one replica of the model: where it is, and its parts."""

    index: int
    """Its place; 0 is the primary."""
    device: torch.device
    """Where it is."""
    decoder: Decoder
    """The whole model."""
    buckets: Sequence[Bucket]
    """Its parameters and gradients, laid out as those of the primary."""
    store: GradientStore
    """What takes its gradients."""


class Replicas:
    """Hold all replicas, the primary first; copy to and from it, and run them side by side."""

    def __init__(self, replicas: Sequence[Replica], recorder: Recorder) -> None:
        """Write what goes through the primary to `recorder`, under the axis "threads"."""
        self._all, self.recorder = tuple(replicas), recorder
        self.threads = ReplicaThreads([one.device for one in self._all], recorder)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[Replica]:
        """Yield all of them, the primary first."""
        return iter(self._all)

    @property
    def primary(self) -> Replica:
        """Return the replica that rests and is updated."""
        return self._all[0]

    @property
    def others(self) -> Sequence[Replica]:
        """Return the replicas that last for a step."""
        return self._all[1:]

    @torch.no_grad()
    def replicate(self) -> None:
        """Give every other replica the parameters of the primary, and let it forget its gradients.

        Step 2 of seven; once a step, for no parameter changes between microbatches.
        """
        start, sent = self.recorder.now(), 0
        for replica in self.others:
            for source, target in zip(self.primary.buckets, replica.buckets, strict=True):
                target.values.copy_(source.values, non_blocking=True)
                sent += num_bytes(source.values)
            replica.store.start_step()
        self.record("replicate", "parameters", start, sent)

    @torch.no_grad()
    def sum_gradients(self, dtype: torch.dtype) -> None:
        """Add the gradients of all other replicas to the primary's, in `dtype`, in their order.

        Step 7 of seven. They are added, never averaged: the loss has one denominator.
        """
        for place, bucket in enumerate(self.primary.buckets):
            start, sent = self.recorder.now(), 0
            total = bucket.gradients.to(dtype)  # itself, where the dtype is the same
            for replica in self.others:
                gradients = replica.buckets[place].gradients
                total.add_(gradients.to(total.device).to(dtype))
                sent += num_bytes(gradients)
            if total is not bucket.gradients:
                bucket.gradients.copy_(total)
            self.record("reduce", f"gradients.{bucket.name}", start, sent)

    def run(self, name: str, work: Callable[[Replica], T]) -> list[T]:
        """Return work(replica) of all replicas, each run by its own thread; raise what one raised.

        Each thread computes gradients or not as the caller does.
        """
        return self.threads.run(name, lambda index: work(self._all[index]))

    def record(self, kind: str, name: str, start: float, sent: int) -> None:
        """Write down what has gone through the primary since `start`."""
        self.threads.record(kind, name, start, sent)

    def close(self) -> None:
        """End all threads."""
        self.threads.close()
