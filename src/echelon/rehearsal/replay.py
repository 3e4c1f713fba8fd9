# SPDX-License-Identifier: Apache-2.0
"""Microbatches that are alike: a few are walked, the others are replayed.

The first microbatch of a stage makes the memory that stays, the last sums gradients. All between
are alike if no bucket is gathered or summed for each of them, and if they come in one order forward
and backward. The engine walks the first three and the last. The second and the third must ask for
the same operations, kernels and memory, in one order. A replay writes these down for each of the
others and computes nothing. Messages between stages are never replayed: the executor sends and
receives the messages of each microbatch.

A microbatch is closed: memory that its passes make ends in them, and the operations that they issue
are awaited in them. Otherwise `NotAlike` is raised, and all microbatches are walked. A few tensors
live on: those of the executor, and statistics of routers. These are tensors in a replay, too. All
other memory is a number in it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from echelon.core.event import Event, EventList
from echelon.parallel.expert.balance import Balancer, RoutingStatistics
from echelon.parallel.offload.host_memory import storage_key
from echelon.parallel.pipeline import PipelineExecutor, StepState
from echelon.rehearsal.memory import MemoryMeter, wrapped
from echelon.rehearsal.order import Entry, HostRead, Issue, Made, Wait
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.rehearsal.work import KernelWork
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.messages import ActionWithMessages

WALKED_FIRST = 3
"""Microbatches that are walked before any is replayed: the first one, and two that are alike."""


class NotAlike(Exception):
    """Raised if microbatches of a stage differ."""


class MemoryChange(NamedTuple):
    """Bytes of a term that are added or end, and their storage."""

    term: str
    num_bytes: int
    kind: str = ""
    """MADE, ENDED, NOTED (statistics of a router are kept), or "" of any other change."""
    storage: int | str = 0
    """Its address; in a recording its number, or the role of a tensor that lives on; if NOTED, the
    place of the statistics."""


MADE, ENDED, NOTED = "made", "ended", "noted"
INPUT, OUTPUT = "input", "output"
INPUT_GRADIENT, OUTPUT_GRADIENT = "gradient of the input", "gradient of the output"
"""Roles of tensors that the executor has."""

Group = tuple[int, str]
"""Microbatches that are alike: their stage, and the kinds of their actions."""


class RecordedMemory(MemoryMeter):
    """A meter that also writes the changes of a pass into `changes`, while there is such a list."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.changes: list[MemoryChange] | None = None

    def made(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it is new."""
        key = storage_key(tensor)
        is_new = key not in self._living
        super().made(tensor)
        if is_new:
            self._name_last(MADE, key)

    def changed(self, term: str, num_bytes: int) -> None:
        """Count bytes that were counted in another microbatch."""
        self._add(term, num_bytes)

    def _add(self, term: str, num_bytes: int) -> None:
        super()._add(term, num_bytes)
        if self.changes is not None:
            self.changes.append(MemoryChange(term, num_bytes))

    def _end(self, key: int) -> None:
        super()._end(key)
        self._name_last(ENDED, key)

    def _name_last(self, kind: str, key: int) -> None:
        if self.changes is not None:
            self.changes[-1] = self.changes[-1]._replace(kind=kind, storage=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """The record of one pass of a microbatch through a stage."""

    changes: Sequence[MemoryChange]
    """Changes of its memory."""
    entries: Sequence[Entry]
    """Its log; a wait has the number of its operation in the microbatch."""
    kernels: Mapping[KernelWork, int]
    """Kernels, and their number of launches."""
    events: Sequence[Event]
    """Events, without times and microbatch."""
    far_bytes: Mapping[str, int]
    """Bytes of the events that go to ranks on other nodes, by axis."""
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    """Tensors that it makes and that live on, by role."""
    statistics: Sequence[tuple[int, Sequence[str]]]
    """Layers with routers, and the roles of their statistics in order."""
    keeps: frozenset[str]
    """Roles of tensors of the executor that the graph or put-off work of the microbatch holds."""


class Microbatch:
    """One microbatch on one stage: its storages as it is walked, its tensors as it is replayed."""

    def __init__(self) -> None:
        """Begin before its forward pass."""
        self.storages: dict[int, int | str] = {}
        self.num_made = 0
        self.issues: list[int] = []
        self.num_awaited = 0
        self.tensors: dict[str, torch.Tensor] = {}

    def canonical(
        self, changes: Sequence[MemoryChange], roles: Mapping[int, str]
    ) -> Sequence[MemoryChange]:
        """Return changes with numbers and `roles` in the place of addresses.

        Raises NotAlike if a storage of another microbatch ends, or if a storage with a role is not
        made in this pass.
        """
        named: list[MemoryChange] = []
        made: dict[int, int] = {}
        for place, change in enumerate(changes):
            address, storage = int(change.storage), change.storage
            if change.kind == MADE:
                storage, made[address] = self.num_made, place
                self.storages[address] = storage
                self.num_made += 1
            elif change.kind == ENDED:
                if address not in self.storages:
                    raise NotAlike(f"{change.num_bytes} bytes of {change.term} end, made by others")
                storage = self.storages.pop(address)
                made.pop(address, None)
            named.append(change._replace(storage=storage))
        for address, role in roles.items():
            if address not in made:
                raise NotAlike(f"the {role} has no memory in its pass")
            named[made[address]] = named[made[address]]._replace(storage=role)
            self.storages[address] = role
        return named

    def canonical_entries(self, log: Sequence[Entry], start: int, task: str) -> Sequence[Entry]:
        """Return the entries of a log from `start` on, without the task of the pass.

        A wait has the number of its operation in the microbatch. Raises NotAlike if an operation of
        another microbatch is awaited.
        """
        named: list[Entry] = []
        for place in range(start, len(log)):
            entry = log[place]
            if isinstance(entry, Wait):
                if entry.issue not in self.issues:
                    raise NotAlike("an operation is awaited that another microbatch has issued")
                named.append(Wait(issue=self.issues.index(entry.issue)))
                self.num_awaited += 1
                continue
            if isinstance(entry, Issue):
                self.issues.append(place)
            if isinstance(entry, Made):
                raise NotAlike("a communicator is made in a pass")
            named.append(replace(entry, task="") if entry.task == task else entry)
        return named

    def write_again(self, log: list[Entry], entries: Sequence[Entry], task: str) -> None:
        """Write entries into a log: with `task`, and waits for this microbatch's operations."""
        for entry in entries:
            if isinstance(entry, Wait):
                log.append(Wait(issue=self.issues[entry.issue]))
                continue
            if isinstance(entry, Issue):
                self.issues.append(len(log))
            if isinstance(entry, Issue | HostRead) and not entry.task:
                log.append(replace(entry, task=task))
            else:
                log.append(entry)

    @property
    def is_closed(self) -> bool:
        """True if all operations are awaited, and each storage that is left has a role."""
        left = any(isinstance(storage, int) for storage in self.storages.values())
        return not left and self.num_awaited == len(self.issues)


class MicrobatchReplay:
    """Walk or replay each pass of the microbatches of a rank."""

    def __init__(
        self,
        shapes: ShapesOnly,
        events: EventList,
        executor: PipelineExecutor,
        balancer: Balancer | None,
        actions: Sequence[Action],
    ) -> None:
        """Replay microbatches of `actions`, which the rank of `executor` runs in a step.

        Without actions all microbatches are walked.
        """
        self._shapes, self._events = shapes, events
        self._executor, self._balancer = executor, balancer
        self._group_of = groups_of_microbatches(actions)
        members: dict[Group, list[int]] = {}
        last: dict[int, int] = {}
        for (stage, microbatch), group in self._group_of.items():
            members.setdefault(group, []).append(microbatch)
            last[stage] = microbatch
        self._recorded = {group: alike[1:WALKED_FIRST] for group, alike in members.items()}
        self._replayed = {
            group: frozenset(alike[WALKED_FIRST:]) - {last[group[0]]}
            for group, alike in members.items()
        }
        self._passes: dict[tuple[Group, ActionKind], list[RecordedPass]] = {}
        self._microbatches: dict[tuple[int, int], Microbatch] = {}
        self._action: Action | None = None
        self._walking = False
        self._statistics: list[tuple[int, RoutingStatistics]] = []
        self._no_graph = torch.empty(0)

    def installed(self) -> AbstractContextManager[None]:
        """Wrap methods of the executor and the model, if any microbatch is replayed."""
        executor, store = self._executor, self._executor.store
        methods: list[tuple[Any, str, Callable[..., Any]]] = []
        if any(self._replayed.values()):
            methods = [
                (executor, "_run_step", self._run_step),
                (executor, "_forward", self._forward),
                (executor, "_backward", self._backward),
                (store, "run_deferred", self._weights),
                (store, "run_collected", self._weights),
            ]
            if self._balancer is not None:
                methods.append((self._balancer, "record", self._note))
        return wrapped(methods)

    def step_began(self) -> None:
        """Forget the step before."""
        self._passes.clear()
        self._microbatches.clear()

    def _run_step(
        self,
        run: Callable[..., None],
        state: StepState,
        step: ActionWithMessages,
        *args: Any,
        **named: Any,
    ) -> None:
        self._action = step.action
        run(state, step, *args, **named)
        self._action = None

    def _forward(
        self,
        run: Callable[..., torch.Tensor | None],
        state: StepState,
        action: Action,
        x_ND: torch.Tensor | None,
        *args: Any,
    ) -> torch.Tensor | None:
        key, last = _key(action), self._executor.stages[action.stage].last
        microbatch = self._microbatches[key] = Microbatch()
        if not self._is_replayed(action):
            if x_ND is not None:
                microbatch.storages[storage_key(x_ND)] = INPUT
            with self._walked(action.kind) as given:
                output = run(state, action, x_ND, *args)
                given[OUTPUT] = state.losses[action.microbatch] if last else output
            return output
        if x_ND is not None:
            state.inputs[key] = x_ND.detach()
        output = self._again(action.kind, OUTPUT)
        assert output is not None
        keeps = last or OUTPUT in self._pass(action.kind).keeps
        state.outputs[key] = output if keeps else self._no_graph
        if last:
            state.losses[action.microbatch] = output.detach()
        return None if last else output

    def _backward(
        self,
        run: Callable[..., torch.Tensor | None],
        state: StepState,
        action: Action,
        dy_ND: torch.Tensor | None,
    ) -> torch.Tensor | None:
        key = _key(action)
        microbatch = self._microbatches[key]
        if not self._is_replayed(action):
            if dy_ND is not None:
                microbatch.storages[storage_key(dy_ND)] = OUTPUT_GRADIENT
            with self._walked(action.kind) as given:
                before = _holders(dy_ND)
                dx_ND = run(state, action, dy_ND)
                if _holders(dy_ND) > before:
                    given[OUTPUT_GRADIENT] = dy_ND
                given[INPUT_GRADIENT] = dx_ND
            return dx_ND
        tensors, keeps = microbatch.tensors, self._pass(action.kind).keeps
        held: dict[str, Any] = {OUTPUT: state.outputs.pop(key), INPUT: state.inputs.pop(key, None)}
        tensors |= {role: held.pop(role) for role in [*held] if held[role] is not self._no_graph}
        dx_ND = self._again(action.kind, INPUT_GRADIENT)
        ends = {INPUT_GRADIENT: dx_ND, OUTPUT_GRADIENT: dy_ND}
        tensors |= {role: end for role, end in ends.items() if end is not None and role in keeps}
        return dx_ND

    def _weights(self, run: Callable[..., None], *args: Any) -> None:
        """Compute weight gradients: of a W, or put off by a BW."""
        action = self._action
        if self._walking or action is None:
            run(*args)
            return
        if self._is_replayed(action):
            self._again(ActionKind.W)
            del self._microbatches[_key(action)]
            return
        with self._walked(ActionKind.W):
            run(*args)
        ended = self._microbatches.pop(_key(action))
        if self._is_recorded(action) and not ended.is_closed:
            raise NotAlike("memory or an operation of a microbatch is left after its last pass")

    def _note(
        self, run: Callable[[int, RoutingStatistics], None], layer: int, noted: RoutingStatistics
    ) -> None:
        """Keep the statistics of a router for a microbatch."""
        memory = self._shapes.memory
        if isinstance(memory, RecordedMemory) and memory.changes is not None:
            memory.changes.append(MemoryChange("", 0, NOTED, len(self._statistics)))
            self._statistics.append((layer, noted))
        run(layer, noted)  # which ends the memory of earlier statistics

    def _group(self, action: Action) -> Group:
        return self._group_of[_key(action)]

    def _is_replayed(self, action: Action) -> bool:
        return action.microbatch in self._replayed[self._group(action)]

    def _is_recorded(self, action: Action) -> bool:
        return action.microbatch in self._recorded[self._group(action)]

    @contextmanager
    def _walked(self, kind: ActionKind) -> Iterator[dict[str, torch.Tensor | None]]:
        """Let the engine compute a pass inside; record it if others are replayed from it.

        The mapping takes the results of the pass by role, and the gradient of the output if it is
        held longer.
        """
        action, shapes, results = self._action, self._shapes, dict[str, torch.Tensor | None]()
        assert action is not None
        memory, log, events = shapes.memory, shapes.log.entries, self._events.events
        assert isinstance(memory, RecordedMemory)
        self._walking = True
        self._statistics.clear()
        if not self._is_recorded(action):
            yield results
            self._walking = False
            return
        far_bytes, kernels = self._executor.recorder.far_bytes, shapes.work.kernels()
        num_entries, num_events, far_before = len(log), len(events), Counter(far_bytes)
        changes = memory.changes = list[MemoryChange]()
        yield results
        self._walking, memory.changes = False, None
        held_longer = results.pop(OUTPUT_GRADIENT, None) is not None
        given = {role: tensor for role, tensor in results.items() if tensor is not None}
        keeps = {role for role in given if _references(given[role]) > 1}
        keeps |= {OUTPUT_GRADIENT} if held_longer else set()
        statistics: list[tuple[int, Sequence[str]]] = []
        roles = {storage_key(tensor): role for role, tensor in given.items()}
        for layer, noted in self._statistics:
            tensors = [getattr(noted, field.name) for field in fields(noted)]
            for place, tensor in enumerate(tensors):
                given[roles.setdefault(storage_key(tensor), f"statistics {layer}.{place}")] = tensor
            statistics.append((layer, [roles[storage_key(tensor)] for tensor in tensors]))
        microbatch = self._microbatches[_key(action)]
        self._passes.setdefault((self._group(action), kind), []).append(
            RecordedPass(
                changes=microbatch.canonical(changes, roles),
                entries=microbatch.canonical_entries(log, num_entries, str(action)),
                kernels=shapes.work.kernels() - kernels,
                events=[
                    replace(event, microbatch=0, start=0.0, end=0.0, waited_s=0.0)
                    for event in events[num_events:]
                ],
                far_bytes=far_bytes - far_before,
                tensors={role: (tensor.shape, tensor.dtype) for role, tensor in given.items()},
                statistics=statistics,
                keeps=frozenset(keeps),
            )
        )
        self._statistics.clear()

    def _pass(self, kind: ActionKind) -> RecordedPass:
        """Return the recorded pass of a group.

        Raises NotAlike if two passes of the group differ, or come in another order.
        """
        assert self._action is not None
        passes = self._passes.get((self._group(self._action), kind), [])
        if len(passes) != WALKED_FIRST - 1 or passes[0] != passes[-1]:
            raise NotAlike(f"passes {kind.value} of stage {self._action.stage}")
        if passes[0] is not passes[-1]:
            shorter = replace(passes[0], changes=without_detours(passes[0].changes))
            passes[:] = [shorter] * len(passes)
        return passes[0]

    def _again(self, kind: ActionKind, result: str = "") -> torch.Tensor | None:
        """Replay a pass; return the tensor with the role `result`."""
        action, shapes, recorded = self._action, self._shapes, self._pass(kind)
        memory = shapes.memory
        assert action is not None
        assert isinstance(memory, RecordedMemory)
        microbatch = self._microbatches[_key(action)]
        tensors = microbatch.tensors
        for change in recorded.changes:
            if change.kind == NOTED:
                layer, roles = recorded.statistics[int(change.storage)]
                assert self._balancer is not None
                names = (part.name for part in fields(RoutingStatistics))
                noted = {name: tensors[role] for name, role in zip(names, roles, strict=True)}
                self._balancer.record(layer, RoutingStatistics(**noted))
                noted.clear()
                for role in set(roles):
                    del tensors[role]
            elif _is_counted(change):
                memory.changed(change.term, change.num_bytes)
            elif change.kind == ENDED:
                tensors.pop(str(change.storage), None)
            else:
                role = str(change.storage)
                size, dtype = recorded.tensors[role]
                with memory.within(change.term):
                    tensors[role] = torch.empty(size, dtype=dtype, device=META)
        for kernel, times in recorded.kernels.items():
            shapes.work.ran(shapes.task, kernel, times)
        microbatch.write_again(shapes.log.entries, recorded.entries, str(action))
        for event in recorded.events:
            self._events.record(replace(event, microbatch=action.microbatch))
        self._executor.recorder.far_bytes.update(recorded.far_bytes)
        return tensors.pop(result, None)


def without_detours(changes: Sequence[MemoryChange]) -> Sequence[MemoryChange]:
    """Return changes with the same highest points and the same end.

    Neighbours that change one term and that have no role become two changes: to the highest point,
    and from there to the last.
    """
    shorter: list[MemoryChange] = []
    for (term, counted), run in groupby(
        changes, key=lambda change: (change.term, _is_counted(change))
    ):
        if not counted:
            shorter += run
            continue
        heights = list(accumulate(change.num_bytes for change in run))
        highest = max(0, *heights)
        steps = (highest, heights[-1] - highest)
        shorter += (MemoryChange(term, step) for step in steps if step)
    return shorter


def _is_counted(change: MemoryChange) -> bool:
    """True if no tensor of a replay begins or ends with the change."""
    return change.kind != NOTED and isinstance(change.storage, int)


def groups_of_microbatches(actions: Sequence[Action]) -> Mapping[tuple[int, int], Group]:
    """Return the group of each stage and microbatch, in the order of their forward passes."""
    kinds: dict[tuple[int, int], str] = {}
    for action in actions:
        kinds[_key(action)] = f"{kinds.get(_key(action), '')} {action.kind.value}"
    return {key: (key[0], names) for key, names in kinds.items()}


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def _holders(tensor: torch.Tensor | None) -> int:
    """Number of names, graphs and tensors that hold a tensor or its storage."""
    if tensor is None:
        return 0
    graphs: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) + graphs + _references(tensor)


def _references(tensor: torch.Tensor) -> int:
    """Number of tensors, also in graphs, that hold the storage of a tensor."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` is one more
