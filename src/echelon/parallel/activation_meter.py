"""What activations take on a rank, seen from the memory: after each action, and at most in it.

Every storage that an operator of PyTorch makes in a step is counted from its making to its end.
Not counted: parameters and gradients in buckets and what their sums need (`cost/bytes_held.py`,
`cost/transient.py`), messages on their way to or from other stages, what routers note of a step,
and what a kernel takes for itself inside.

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

from echelon.parallel.collectives import Group, Pending
from echelon.parallel.pipeline import InFlight
from echelon.parallel.rank_model import RankModel
from echelon.schedule.action import Action

_LOOK_S, _MOST_LOOKS = 0.0001, 100_000
"""How long to sleep between two looks whether a thread has let go, and how often to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Say what an action left, and the most that was there while it ran, both in bytes."""

    action: str
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Living:
    """Say what made a storage, and how large it is."""

    bytes: int
    operator: str
    shape: tuple[int, ...]
    reference: object


class ActivationMeter(TorchDispatchMode):
    """Count the storages that live, and write down what each action of a step leaves."""

    def __init__(self, model: RankModel) -> None:
        """Count nothing yet."""
        super().__init__()
        self.living: dict[int, Living] = {}
        self.actions: list[ActionMemory] = []
        self.at_peak: list[Living] = []
        self._model = model
        self._bytes = self._peak = self._beside = self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it makes: no view, nothing that it writes in place."""
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        given = {key for key, _ in _storages((args, kwargs))}
        for key, tensor in _storages(out):
            if key not in given and key not in self.living:
                self._add(key, tensor, str(func))
        if self._bytes > self._peak:
            self._peak = self._bytes
            self.at_peak = list(self.living.values())
        return out

    def begins(self, action: Action, state: InFlight) -> None:
        """Learn that an action has what it needs."""
        self._beside = self._aside(state)
        self._peak = self._bytes

    def ended(self, action: Action, state: InFlight) -> None:
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
            model.residency: ("enter", "leave", "enter_backward", "leave_backward"),
        }
        for owner, methods in names.items():
            for name in methods:
                setattr(owner, name, self._unseen(getattr(owner, name)))
        executor, run = model.executor, model.executor.run

        def run_counted(*args: Any) -> Any:
            with self:
                return run(*args)

        executor.watch = self
        setattr(executor, "run", run_counted)  # noqa: B010
        try:
            with _threads_let_go():
                yield self
        finally:
            executor.watch = None
            del executor.run
            for owner, methods in names.items():
                for name in methods:
                    delattr(owner, name)

    def _add(self, key: int, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self.living[key] = Living(storage.nbytes(), operator, tuple(tensor.shape), reference)
        self._bytes += storage.nbytes()

    def _remove(self, key: int) -> None:
        self._bytes -= self.living.pop(key).bytes

    def _unseen(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **named: Any) -> Any:
            self._paused += 1
            try:
                return method(*args, **named)
            finally:
                self._paused -= 1

        return unseen

    def _aside(self, state: InFlight) -> int:
        """Return the bytes of messages that are no input of a stage here, and of notes."""
        moving = [tensor for sent in state.leaving.values() for tensor, _ in sent]
        moving += [*state.handed_over.values(), *(buffer for buffer, _ in state.arriving.values())]
        keys = {key for key, _ in _storages(moving)}
        keys -= {key for key, _ in _storages(list(state.inputs.values()))}
        balancer = self._model.balancer
        notes = [] if balancer is None else balancer.notes()
        keys |= {key for key, _ in _storages([_fields(note) for note in notes])}
        return sum(self.living[key].bytes for key in keys if key in self.living)


class _LetGo(Pending):
    """A collective under way, whose wait ends when nobody holds the tensors that it was given."""

    __slots__ = ("_lent", "_pending")

    def __init__(self, pending: Pending, lent: Sequence[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self._pending, self._lent = pending, lent

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        self._pending.wait()
        for _ in range(_MOST_LOOKS):
            if all(tensor() is None for tensor in self._lent):
                return
            time.sleep(_LOOK_S)
        raise RuntimeError("a thread of the network never let go of a tensor")


@contextmanager
def _threads_let_go() -> Iterator[None]:
    """Lend the collectives that threads run tensors of their own, of the same memory."""
    methods = {name: getattr(Group, name) for name in ("all_reduce", "all_to_all")}

    def lending(method: Callable[..., Pending]) -> Callable[..., Pending]:
        def run(self: Group, *tensors: Any, name: str, async_op: bool = False) -> Pending:
            lent = [tensor.detach() for tensor in tensors]
            pending = method(self, *lent, name=name, async_op=True)
            pending = _LetGo(pending, [weakref.ref(tensor) for tensor in lent])
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


def _fields(note: Any) -> list[Any]:
    return [getattr(note, field.name) for field in fields(note)]


def _storages(tree: Any) -> Iterable[tuple[int, torch.Tensor]]:
    for one in tree_leaves(tree):
        if torch.is_tensor(one):
            yield one.untyped_storage()._cdata, one
