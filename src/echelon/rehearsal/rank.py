# SPDX-License-Identifier: Apache-2.0
"""One rank of a plan, built and stepped by the engine that trains, on tensors without elements.

A run takes two steps: the first one makes what stays, the second is what every later one does.
Memory, work and bytes are those of the second; the order of operations is that of both, with the
start before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from echelon.core.event import Event, EventList
from echelon.core.plan import Plan
from echelon.cost.bytes.local_sgd import outer_bytes
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.layout.islands import plan_and_rank
from echelon.models.batch import TokenBatch
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.pipeline import StepState
from echelon.parallel.transport.recorder import Recorder
from echelon.rehearsal.groups import RehearsedCompletion
from echelon.rehearsal.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    MemoryMeter,
    MemoryPoint,
    Misuse,
    wrapped,
)
from echelon.rehearsal.order import Entry, HostRead, RankLog
from echelon.rehearsal.replay import MicrobatchReplay, NotAlike, RecordedMemory
from echelon.rehearsal.shapes import META, KnownResults, ShapesOnly
from echelon.rehearsal.traces import (
    ActionBegan,
    ActionEnded,
    StepLog,
    SteppedLog,
    SteppedMemory,
    SteppedWork,
    TraceFolder,
)
from echelon.rehearsal.work import Work
from echelon.schedule.action import Action
from echelon.training.engine import TrainEngine, make_engine
from echelon.training.optimizer import muon

NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRehearsal:
    """Hold what one rank did."""

    rank: int
    """The rank."""
    entries: tuple[Entry, ...]
    """What it gave its communicators, and its waits, from the start to the end of the run."""
    misuses: tuple[Misuse, ...]
    """Where it touched memory in flight, or took data for other data."""
    held: Mapping[str, int]
    """Bytes that live between steps, by term."""
    peak_bytes: int
    """The most that lived at one time in a step."""
    at_peak: Mapping[str, int]
    """What lived then, by term."""
    most: Mapping[str, int]
    """The most of each term in a step, each at its own time."""
    points: tuple[MemoryPoint, ...]
    """What each action left."""
    work: Mapping[str, Work]
    """Kernels, bytes and FLOPs by the kind of action; "" is what is outside of all."""
    sent: Mapping[str, int]
    """Bytes sent in a step, by axis."""
    far_sent: Mapping[str, int]
    """Bytes of them that went to ranks on other nodes, by axis."""
    in_flight: Mapping[int | None, int]
    """The most microbatches that the executor held for their backward, by stage; None: of all."""
    events: tuple[Event, ...]
    """What a step recorded."""
    reads: Mapping[tuple[str, str], int]
    """How often a step reads from the device in the middle of its actions, by the kind of action
    and by what is read ("" where the engine does not say so)."""


def num_steps(plan: Plan) -> int:
    """Return the steps that are rehearsed: of local SGD to the last outer step of a round."""
    local = plan.mathematics.local_sgd
    return local.every + local.delay if local.active else NUM_STEPS


def with_short_rounds(plan: Plan) -> Plan:
    """Return a plan whose rounds of local SGD have two steps, or one for each fragment."""
    local = plan.mathematics.local_sgd
    if not local.active:
        return plan
    short = replace(local, every=max(NUM_STEPS, local.fragments), delay=min(local.delay, 1))
    return replace(plan, mathematics=replace(plan.mathematics, local_sgd=short))


def planned_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes that the formulas say of the last step that is rehearsed, by axis."""
    if not plan.mathematics.local_sgd.active:
        return bytes_sent_by_axis(plan, rank)
    found = bytes_sent_by_axis(*plan_and_rank(plan, rank))
    for term in outer_bytes(plan, rank, num_steps(plan) - 1):
        found[term.axis] = found.get(term.axis, 0) + term.bytes
    return found


def rehearse_rank(
    plan: Plan,
    rank: int,
    documents: tuple[int, ...] | None = None,
    *,
    known: KnownResults | None = None,
    traces: TraceFolder | None = None,
) -> RankRehearsal:
    """Return what a rank of `plan` does on GPUs under NCCL; `known` may be what others have.

    Sequences are of one document each, or of those that start at the positions `documents`.
    """
    if traces is not None and rank not in traces.left_out:
        return _rehearse(plan, rank, documents, known, traces, replays=False)
    with suppress(NotAlike):
        return _rehearse(plan, rank, documents, known, None, replays=True)
    return _rehearse(plan, rank, documents, known, None, replays=False)


def _rehearse(
    plan: Plan,
    rank: int,
    documents: tuple[int, ...] | None,
    known: KnownResults | None,
    traces: TraceFolder | None,
    *,
    replays: bool,
) -> RankRehearsal:
    """Build and step a rank; raise NotAlike if `replays` and its microbatches are not alike."""
    step_log, events = None if traces is None else StepLog(), EventList()
    shapes = _shapes(rank, known, step_log)
    log = shapes.log
    memory = shapes.memory
    with shapes:
        recorder = _TaskRecorder(rank, events, shapes)
        engine = make_engine(plan, recorder, META, RehearsedCompletion(shapes))
        _name_state(memory, engine)
        shapes.data.follow(engine.model.buckets)
        observer = _Observer(memory, step_log)
        replay = _replay(engine, shapes, events, walks_all=not replays)
        followed = shapes.data.following(engine.model.executor)
        with replay.installed(), followed, _terms(shapes, engine, observer):
            for step in range(num_steps(plan)):
                replay.step_began()
                memory.forget_peak()
                held = memory.now()
                shapes.work.by_task.clear()
                events.events.clear()
                recorder.far_bytes.clear()
                before = len(log.entries)
                if step_log is not None:
                    step_log.step_began(held)
                engine.step(_batches(plan, engine, step, documents), step)
                shapes.flight.step_ended()
            # An exchange of matrices may have nothing from this rank.
            sent = {axis: size for axis, size in events.bytes_by_axis().items() if size}
            recorded, far_sent = tuple(events.events), dict(recorder.far_bytes)
            engine.parts.settle()
        found = RankRehearsal(
            rank=rank,
            entries=tuple(log.entries),
            misuses=tuple(shapes.flight.misuses),
            held=held,
            peak_bytes=memory.peak_bytes,
            at_peak=dict(memory.at_peak),
            most=dict(memory.most),
            points=tuple(memory.points),
            work=dict(shapes.work.by_task),
            sent=sent,
            far_sent=far_sent,
            in_flight=observer.in_flight,
            events=recorded,
            reads=_reads(log.entries[before:]),
        )
        if traces is not None and step_log is not None:
            traces.write(rank, step_log.items)
        engine.close()
    return found


def _replay(
    engine: TrainEngine, shapes: ShapesOnly, events: EventList, *, walks_all: bool
) -> MicrobatchReplay:
    """Replay of alike microbatches; of none where each gathers parameters or sums gradients."""
    model = engine.model
    apart = any(bucket.plan.sliced or bucket.adds_slices for bucket in model.buckets)
    actions: Sequence[Action] = ()
    if engine.computes and not apart and not walks_all:
        actions = engine.schedule.actions[model.executor.pp_rank]
    return MicrobatchReplay(shapes, events, model.executor, model.balancer, actions)


def _shapes(rank: int, known: KnownResults | None, step_log: StepLog | None) -> ShapesOnly:
    """Return where a rank runs; what it does there is also written into `step_log`."""
    if step_log is None:
        return ShapesOnly(RankLog(rank), known, memory=RecordedMemory())
    return ShapesOnly(
        SteppedLog(rank, step_log),
        known,
        memory=SteppedMemory(step_log),
        work=SteppedWork(step_log),
    )


class _TaskRecorder(Recorder):
    """A recorder that tells the rehearsal what the rank is at."""

    def __init__(self, rank: int, sink: EventList, shapes: ShapesOnly) -> None:
        super().__init__(rank, sink)
        self._shapes = shapes

    def at(self, task: str, turn: int | None) -> None:
        super().at(task, turn)
        self._shapes.task = task.rstrip("0123456789.")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        self._shapes.reading = what
        try:
            yield
        finally:
            self._shapes.reading = ""


def _reads(entries: Sequence[Entry]) -> Mapping[tuple[str, str], int]:
    reads = (one for one in entries if isinstance(one, HostRead) and one.task)
    return Counter((one.task, one.what) for one in reads)


def _batches(
    plan: Plan, engine: TrainEngine, step: int, documents: tuple[int, ...] | None
) -> list[TokenBatch]:
    """Return the microbatches of a step: a server has none."""
    if not engine.computes:
        return []
    starts = None if documents is None else (documents,) * plan.layout.microbatch_sequences
    mathematics = plan.mathematics
    length, rows = mathematics.sequence_length, plan.layout.microbatch_sequences
    tokens_BT = torch.zeros((rows, length), dtype=torch.int64)
    whole = TokenBatch.from_rows(
        tokens_BT, tokens_BT, torch.arange(rows), step=step, seed=mathematics.seed
    )
    here = whole.cut(engine.runs_for(length), starts)
    here = replace(here, counted=here.num_valid())
    return [here.to(META) for _ in range(plan.num_microbatches)]


def _name_state(memory: MemoryMeter, engine: TrainEngine) -> None:
    """Say what the storages are for that live between steps."""
    buckets = engine.model.buckets
    if engine.computes:  # which has no memory for the whole
        memory.is_for(PARAMETERS, [one.values for one in buckets])
        memory.is_for(GRADIENTS, [one.gradients for one in buckets])
    here = [one for one in buckets if one.offload_store is None]
    memory.is_for(PARAMETERS, [one.value_slice for one in here])
    memory.is_for(GRADIENTS, [one.gradient_slice for one in buckets])
    for fp8 in (one.fp8 for one in buckets if one.fp8 is not None):
        memory.is_for(PARAMETERS, [fp8.codes, fp8.scales])
    memory.is_for(PARAMETERS, engine.model.gathering.secondary.tensors)
    store = engine.optimizer.store
    memory.is_for(OPTIMIZER, [one for held in engine.parts.held().values() for one in held])
    if type(store) is MemoryOffloadStore:
        state = engine.optimizer.state().values()
        memory.is_for(OPTIMIZER, [tensor for flats in state for tensor in flats.values()])


@contextmanager
def _terms(shapes: ShapesOnly, engine: TrainEngine, observer: _Observer) -> Iterator[None]:
    """Count what is made in a step as what it is for."""
    memory, model = shapes.memory, engine.model
    names: list[tuple[Any, tuple[str, ...], str]] = [
        (model.reduction, ("before_write", "bucket_is_full", "finish"), BUFFERS),
        (model.gathering, ("enter", "enter_backward", "updated"), GATHERED),
        (model.executor, ("run",), ACTIVATIONS),
        (model.executor, ("_post_receive",), MESSAGES),
        (engine.optimizer, ("update",), BUFFERS),
        (model.gathering.codes, ("refresh",), BUFFERS),
        # The inside of a computation is no buffer: gradients widened, Newton-Schulz.
        (engine.optimizer, ("_elements",), OTHER),
        (muon, ("newton_schulz",), OTHER),
    ]
    names += [(part, ("after_update",), BUFFERS) for part in engine.parts if part.held()]
    model.executor.observer = observer
    counted = [
        (owner, name, partial(_within, memory, term))
        for owner, methods, term in names
        for name in methods
    ]
    with wrapped(counted):
        yield
    model.executor.observer = None


def _within(
    memory: MemoryMeter, term: str, method: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    with memory.within(term):
        return method(*args, **named)


class _Observer:
    """Whoever writes down what each action leaves."""

    def __init__(self, memory: MemoryMeter, step_log: StepLog | None) -> None:
        self._memory, self._step_log = memory, step_log
        self.in_flight = Counter[int | None]()

    def action_began(self, action: Action, state: StepState) -> None:
        """Count what came as a message as the input that it is now."""
        if self._step_log is not None:
            self._step_log.items.append(ActionBegan(str(action)))
        self._memory.is_for(ACTIVATIONS, _tensors(state.inputs.values()))

    def action_ended(self, action: Action, state: StepState) -> None:
        """Count what leaves as a message, and write down what is left."""
        leaving = [tensor for sent in state.leaving.values() for tensor, _ in sent]
        self._memory.is_for(MESSAGES, [*leaving, *state.handed_over.values()])
        self._memory.is_for(ACTIVATIONS, _tensors(state.inputs.values()))
        self._memory.action_ended(str(action))
        held = Counter[int | None](stage for stage, _ in {*state.outputs, *state.weights})
        held[None] = held.total()
        self.in_flight |= held
        if self._step_log is not None:
            self._step_log.items.append(ActionEnded())


def _tensors(values: Any) -> Sequence[torch.Tensor]:
    return [one for one in values if isinstance(one, torch.Tensor)]
