"""The replicas of a model, each with its thread, and what is copied between them and the primary.

Replicas keep their buckets between steps: what is in them is written over in the next step, by the
parameters of the primary and by the first microbatch's gradients. So a stale replica can only be
one that was not refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.event import Event
from echelon.launch.host import ThreadClock
from echelon.models.decoder import Decoder
from echelon.parallel.buckets import Bucket
from echelon.parallel.gradients import GradientStore
from echelon.parallel.transport.recorder import BegunCall, Recorder

THREAD_KIND = "thread"
"""Kind of the event of what one replica computed in one pass."""

T = TypeVar("T")


@dataclass(slots=True)
class ThreadSeconds:
    """Add up how long a thread was at work, and how long of that it was blocked.

    A thread that has work and neither runs nor queues for a core waits for the lock of the
    interpreter, which one thread of a process has at a time.
    """

    wall_s: float = 0.0
    blocked_s: float = 0.0

    def add(self, wall_s: float, blocked_s: float) -> None:
        """Count one pass."""
        self.wall_s += wall_s
        self.blocked_s += blocked_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Hold one replica of the model: where it is, its parts, and the thread that runs it."""

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
    thread: ThreadPoolExecutor
    """One thread."""
    seconds: ThreadSeconds = field(default_factory=ThreadSeconds)
    """What its thread has taken since it was made."""

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()


def start_thread(index: int, device: torch.device, count: int) -> ThreadPoolExecutor:
    """Return the thread of one of `count` replicas, which computes on `device`.

    On a CPU the threads of PyTorch's own operators are shared out, so that N replicas ask for as
    many cores as one process did.
    """
    cores = max(1, torch.get_num_threads() // count)

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(cores)

    return ThreadPoolExecutor(1, thread_name_prefix=f"replica-{index}", initializer=begin)


def replica_devices(primary: torch.device, count: int) -> list[torch.device]:
    """Return where `count` replicas are: on the first GPUs of the host, or all on its CPU."""
    if primary.type != "cuda":
        return [primary] * count
    first = primary.index or 0
    others = [torch.device("cuda", n) for n in range(count + 1) if n != first]
    return [primary, *others[: count - 1]]


class Replicas:
    """Hold all replicas, the primary first; copy to and from it, and run them side by side."""

    def __init__(self, replicas: Sequence[Replica], recorder: Recorder) -> None:
        """Write what goes through the primary to `recorder`, under the axis "threads"."""
        self._all, self.recorder = tuple(replicas), recorder

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
        gradients, microbatch = torch.is_grad_enabled(), self.recorder.microbatch

        def timed(replica: Replica) -> tuple[T, float, float]:
            start, clock = self.recorder.now(), ThreadClock.read()
            with torch.set_grad_enabled(gradients):
                result = work(replica)
            end = self.recorder.now()
            replica.seconds.add(end - start, ThreadClock.read().blocked_since(clock, end - start))
            return result, start, end

        running = [replica.thread.submit(timed, replica) for replica in self._all]
        wait(running)
        ended = [one.result() for one in running]
        for replica, (_, start, end) in zip(self._all, ended, strict=True):
            self.recorder.sink.record(
                Event(
                    kind=THREAD_KIND,
                    name=f"{name} of replica {replica.index}",
                    microbatch=microbatch,
                    start=start,
                    end=end,
                    rank=self.recorder.rank,
                )
            )
        return [result for result, _, _ in ended]

    def record(self, kind: str, name: str, start: float, sent: int) -> None:
        """Write down what has gone through the primary since `start`."""
        call = BegunCall(kind=kind, name=name, start=start, axis=THREADS_AXIS, num_bytes=sent)
        self.recorder.ended(call, None)

    def close(self) -> None:
        """End all threads."""
        for replica in self._all:
            replica.close()


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()
