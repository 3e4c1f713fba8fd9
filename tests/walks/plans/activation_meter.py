# SPDX-License-Identifier: Apache-2.0
"""What activations take on a rank, seen from the memory: after each action, and at most in it.

Every storage that an operator of PyTorch makes in a step is counted from its making to its end.
Not counted: parameters and gradients in buckets and what their sums need (`cost/bytes/held.py`,
`cost/bytes/transient.py`), messages on their way to or from other stages, what routers note of a
step, and what a kernel takes for itself inside.

A thread of Gloo holds the tensors of a collective for a moment after it has said that the result is
there. That moment depends on the load of the machine, so a wait that is counted ends only when the
thread has let go.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.parallel.pipeline import StepState
from echelon.parallel.rank_model import RankModel
from echelon.parallel.transport.collectives import Group, Pending
from echelon.schedule.action import Action

_POLL_S = 0.0001  # seconds
_MAX_POLLS = 100_000  # polls
"""How long to sleep between two looks whether a thread has let go, and how often to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Say what an action left, and the most that was there while it ran, both in bytes."""

    action: str
    kept_bytes: int
    peak_bytes: int


class ActivationMeter(TorchDispatchMode):
    """Count the storages that live, and write down what each action of a step leaves."""

    def __init__(self, model: RankModel) -> None:
        super().__init__()
        self.actions: list[ActionMemory] = []
        self._model = model
        self._living: dict[int, tuple[int, object]] = {}  # bytes, and what tells of the end
        self._bytes = self._peak = self._beside = self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it makes: no view, nothing that it writes in place."""
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        given = {key for key, _ in _storages((args, kwargs))}
        for key, tensor in _storages(out):
            if key not in given and key not in self._living:
                self._add(key, tensor.untyped_storage())
        self._peak = max(self._peak, self._bytes)
        return out

    def action_began(self, action: Action, state: StepState) -> None:
        """Learn that an action has what it needs."""
        self._beside = self._aside(state)
        self._peak = self._bytes

    def action_ended(self, action: Action, state: StepState) -> None:
        """Write down an action that has ended."""
        self.actions.append(
            ActionMemory(
                action=str(action),
                kept_bytes=self._bytes - self._aside(state),
                peak_bytes=self._peak - self._beside,
            )
        )

    @contextmanager
    def watching(self) -> Iterator[ActivationMeter]:
        """Count in the steps that are taken inside."""
        model = self._model
        names = {
            model.reduction: ("before_write", "bucket_is_full"),
            model.gathering: ("enter", "leave", "enter_backward", "leave_backward"),
        }
        for owner, methods in names.items():
            for name in methods:
                setattr(owner, name, self._unseen(getattr(owner, name)))
        executor, run = model.executor, model.executor.run

        def run_counted(*args: Any) -> Any:
            with self:
                return run(*args)

        executor.observer = self
        setattr(executor, "run", run_counted)  # noqa: B010
        try:
            with _lend_tensors_to_threads():
                yield self
        finally:
            executor.observer = None
            del executor.run
            for owner, methods in names.items():
                for name in methods:
                    delattr(owner, name)

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        self._living[key] = storage.nbytes(), weakref.ref(storage, lambda _: self._remove(key))
        self._bytes += storage.nbytes()

    def _remove(self, key: int) -> None:
        self._bytes -= self._living.pop(key)[0]

    def _unseen(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **named: Any) -> Any:
            self._paused += 1
            try:
                return method(*args, **named)
            finally:
                self._paused -= 1

        return unseen

    def _aside(self, state: StepState) -> int:
        """Return the bytes of messages that are no input of a stage here, and of notes."""
        moving = [tensor for sent in state.leaving.values() for tensor, _ in sent]
        moving += [*state.handed_over.values(), *(buffer for buffer, _ in state.arriving.values())]
        keys = {key for key, _ in _storages(moving)}
        keys -= {key for key, _ in _storages(list(state.inputs.values()))}
        balancer = self._model.balancer
        notes = [] if balancer is None else balancer.recorded()
        noted = [getattr(note, field.name) for note in notes for field in fields(note)]
        keys |= {key for key, _ in _storages(noted)}
        return sum(self._living[key][0] for key in keys if key in self._living)


class _ReleasingPending(Pending):
    """A collective under way, whose wait ends when nobody holds the tensors that it was given."""

    __slots__ = ("_pending", "_tensors")

    def __init__(self, pending: Pending, lent: Sequence[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self._pending, self._tensors = pending, lent

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        self._pending.wait()
        for _ in range(_MAX_POLLS):
            if all(tensor() is None for tensor in self._tensors):
                return
            time.sleep(_POLL_S)
        raise RuntimeError("a thread of the network never let go of a tensor")


@contextmanager
def _lend_tensors_to_threads() -> Iterator[None]:
    """Lend the collectives that threads run tensors of their own, of the same memory."""
    methods = {name: getattr(Group, name) for name in ("all_reduce", "all_to_all")}

    def lending(method: Callable[..., Pending]) -> Callable[..., Pending]:
        def run(
            self: Group, *tensors: Any, name: str, async_op: bool = False, **how: Any
        ) -> Pending:
            lent = [tensor.detach() for tensor in tensors]
            pending = method(self, *lent, name=name, async_op=True, **how)
            pending = _ReleasingPending(pending, [weakref.ref(tensor) for tensor in lent])
            del lent
            if not async_op:
                pending.wait()
            return pending

        return run

    for name, method in methods.items():
        setattr(Group, name, lending(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Group, name, method)


def _storages(tree: Any) -> Iterable[tuple[int, torch.Tensor]]:
    for one in tree_leaves(tree):
        if torch.is_tensor(one):
            yield one.untyped_storage()._cdata, one
