# SPDX-License-Identifier: Apache-2.0
"""The threads of replicas: one for each, which computes as the thread that asked would.

Whether gradients are computed, inference mode and autocast belong to a thread in PyTorch, and so do
a GPU and its stream: each pass carries those of the caller over. On GPUs the primary computes in
the thread of the caller: autograd calls a backward of ours in the one thread that it has for the
primary's device, and a backward of the primary in another thread would wait for that one for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from echelon.core.event import Event
from echelon.cost.bytes.threads import THREADS_AXIS
from echelon.launch.host import ThreadClock
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
class ReplicaThread:
    """Hold the thread of one replica."""

    index: int
    """Its place; 0 is the primary."""
    device: torch.device
    """Where it computes."""
    thread: ThreadPoolExecutor
    """One thread."""
    seconds: ThreadSeconds = field(default_factory=ThreadSeconds)
    """What its passes have taken since it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadModes:
    """Hold what belongs to a thread in PyTorch, and changes what a module computes."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool, bool], ...]
    """Of each type of device: its dtype, whether it is on, and whether casts are kept."""

    @classmethod
    def of_caller(cls, devices: Sequence[torch.device]) -> ThreadModes:
        """Return those of the calling thread, autocast for the CPU and the types of `devices`."""
        keeps = torch.is_autocast_cache_enabled()
        return cls(
            gradients=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), keeps)
                for kind in sorted({"cpu", *(device.type for device in devices)})
            ),
        )

    @contextmanager
    def entered(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Give them to the calling thread, and a GPU's stream, for what happens inside."""
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype, enabled, keeps in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=keeps))
            yield


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


class ReplicaThreads:
    """Hold the threads of all replicas, and run them side by side."""

    def __init__(self, devices: Sequence[torch.device], recorder: Recorder) -> None:
        """Start a thread for each of `devices`, the primary's first; write passes to `recorder`."""
        self.recorder = recorder
        self._all = tuple(
            ReplicaThread(
                index=index, device=device, thread=start_thread(index, device, len(devices))
            )
            for index, device in enumerate(devices)
        )

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[ReplicaThread]:
        """Yield all of them, the primary's first."""
        return iter(self._all)

    def run(self, name: str, work: Callable[[int], T], count: int | None = None) -> list[T]:
        """Return work(index) of the first `count` replicas (all), each run by its own thread.

        What one raised is raised with its traceback, and a note that names the replica; all have
        ended then.
        """
        members, microbatch = self._all[:count], self.recorder.microbatch
        modes = ThreadModes.of_caller([member.device for member in members])
        streams = {
            member.index: torch.cuda.current_stream(member.device)
            for member in members
            if member.device.type == "cuda"
        }

        def timed(member: ReplicaThread) -> tuple[T, float, float]:
            start, clock = self.recorder.now(), ThreadClock.read()
            with modes.entered(streams.get(member.index)):
                result = work(member.index)
            end = self.recorder.now()
            member.seconds.add(end - start, ThreadClock.read().blocked_since(clock, end - start))
            return result, start, end

        here = 1 if streams else 0
        running = [member.thread.submit(timed, member) for member in members[here:]]
        if here:
            running.insert(0, _run_here(timed, members[0]))
        wait(running)
        _raise_what_failed(running, members, len(self._all))
        ended = [one.result() for one in running]
        for member, (_, start, end) in zip(members, ended, strict=True):
            self.recorder.sink.record(
                Event(
                    kind=THREAD_KIND,
                    name=f"{name} of replica {member.index}",
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
        for member in self._all:
            member.thread.shutdown()


def _run_here(
    work: Callable[[ReplicaThread], tuple[T, float, float]], member: ReplicaThread
) -> Future[tuple[T, float, float]]:
    """Return what a replica computes in the calling thread, which keeps its GPU."""
    ended: Future[tuple[T, float, float]] = Future()
    try:
        with torch.cuda.device(member.device):
            ended.set_result(work(member))
    except BaseException as error:  # raised when the others have ended, as theirs is
        ended.set_exception(error)
    return ended


def _raise_what_failed(
    running: Sequence[Future[T]], members: Sequence[ReplicaThread], count: int
) -> None:
    """Raise what the first replica raised of those that failed, and tell which these are."""
    failed = [
        (member, error)
        for member, one in zip(members, running, strict=True)
        if (error := one.exception()) is not None
    ]
    if not failed:
        return
    (member, first), others = failed[0], failed[1:]
    first.add_note(f"in replica {member.index} of {count}, on {member.device}")
    for other, error in others:
        first.add_note(f"replica {other.index} raised too: {type(error).__name__}: {error}")
    raise first


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()
