"""What a rank keeps in memory between the actions of a schedule, seen from the memory itself.

Every tensor that a forward pass or a B makes is noted by its storage, without keeping it. After
each action those that are still there say which microbatches are held: nothing is asked of the
executor's own lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import Action, ActionKind
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from tests.parallel.one_device import make_rows

Key = tuple[int, int]


class _Made(TorchDispatchMode):
    """Note the storage of all that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))  # a view, or what is written in place, is not made here
        self.storages += [one for one in _storages(out) if one not in given]
        return out


def _storages(tree: Any) -> list[StorageWeakRef]:
    return [_storage(one) for one in tree_leaves(tree) if torch.is_tensor(one)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@dataclass(slots=True)
class LiveState:
    """What was seen on one rank in one step: after every action, what is still held.

    `held` has the (stage, microbatch) pairs of which anything is there that a pass made or was
    given, but its output; `kept_outputs` those whose output is there, though it is neither on its
    way nor the input of the next stage on this rank, which that stage holds itself.
    """

    actions: list[str] = field(default_factory=list)
    held: list[set[Key]] = field(default_factory=list)
    kept_outputs: list[set[Key]] = field(default_factory=list)


class _Watch:
    """Follow the executor of an engine through a step."""

    def __init__(self, engine: TrainEngine) -> None:
        self.life = LiveState()
        self._made: dict[Key, list[StorageWeakRef]] = {}
        self._outputs: dict[Key, StorageWeakRef] = {}
        self._executor: Any = engine.model.executor
        self._passes = {name: getattr(self._executor, name) for name in ("_forward", "_backward")}
        self._run_step = self._executor._run_step
        for name in self._passes:
            setattr(self._executor, name, self._watched(name))
        self._executor._run_step = self._watched_step

    def _watched(self, name: str) -> Any:
        def watched(state: Any, action: Action, *rest: Any) -> torch.Tensor | None:
            key = (action.stage, action.microbatch)
            made = _Made()
            with made:
                out = self._passes[name](state, action, *rest)
            given = [out] if out is not None else []
            if action.kind is ActionKind.F:
                given += [state.losses[key[1]]] if key[1] in state.losses else []
                for one in given:
                    self._outputs[key] = _storage(one)
                if key in state.inputs:
                    made.storages.append(_storage(state.inputs[key]))
            gone = {_storage(one) for one in given}
            self._made.setdefault(key, []).extend(s for s in made.storages if s not in gone)
            return out

        return watched

    def _watched_step(self, state: Any, step: Any, *rest: Any, **named: Any) -> None:
        self._run_step(state, step, *rest, **named)
        life = self.life
        life.actions.append(str(step.action))
        life.held.append(
            {key for key, made in self._made.items() if not all(s.expired() for s in made)}
        )
        messages = (tensor for sent in state.leaving.values() for tensor, _ in sent)
        given = {_storage(one) for one in (*messages, *state.handed_over.values())}
        given |= {_storage(one) for one in state.losses.values()}
        inputs = {(stage - 1, microbatch) for stage, microbatch in life.held[-1]}
        life.kept_outputs.append(
            {
                key
                for key, output in self._outputs.items()
                if not output.expired() and output not in given and key not in inputs
            }
        )

    @contextmanager
    def ended(self) -> Iterator[LiveState]:
        """Look no more."""
        yield self.life
        for name, method in self._passes.items():
            setattr(self._executor, name, method)
        self._executor._run_step = self._run_step


def record_live_state(context: RankContext, plan: Plan) -> LiveState:
    """Take two steps; return what was held in the second, when all that stays has been made."""
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents()), context.device)

    def step(number: int) -> None:
        runs = engine.runs_for(plan.mathematics.sequence_length)
        batches = rank_batches(plan, make_rows(plan, number), engine.data_rank, number, runs=runs)
        engine.step(batches, number)

    step(0)
    with _Watch(engine).ended() as life:
        step(1)
    return life
