# SPDX-License-Identifier: Apache-2.0
"""Our engine as the thing under proof (`echelon.training.subject:build`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from echelon.core.attention_mask import DocumentStarts, PositionRun
from echelon.core.choices.updates import AppliedGradient
from echelon.core.event import EventList
from echelon.core.piece_sizes import PROOF_PIECES, TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.parallel.completion.completion import Completion
from echelon.parallel.offload.store import storage_bytes
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder, clock_of
from echelon.schedule.action import ActionKind
from echelon.training.engine import TrainEngine, make_engine
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.meetings import Meeting
from echelon.training.recorders import (
    ActivationRecorder,
    RecordedActivation,
    RecordedRouting,
    RoutingRecorder,
)
from echelon.training.servers.asynchronous import AsynchronousServer


class BatchRows(Protocol):
    """A whole global batch, one sequence per row (the prover's `ProofBatch` is one)."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of the rows."""
        ...

    @property
    def inputs_BT(self) -> torch.Tensor:
        """Token ids."""
        ...

    @property
    def labels_BT(self) -> torch.Tensor:
        """The token that follows each, or the ignored label."""
        ...

    @property
    def documents(self) -> DocumentStarts | None:
        """Where documents start in each row; None where attention does not care."""
        ...


MESSAGE_S = 120.0
"""Seconds for which a message between islands that may be lost is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Say what one rank did in one step."""

    loss: float
    """Mean loss of the global batch."""
    tokens: int
    """Counted tokens of the global batch."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    skipped: bool
    """Whether a gradient overflowed, so that nothing was updated."""
    loss_scale: float
    """The factor of the loss in the backward of this step."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """(loss sum, counted tokens) of each (data rank, microbatch) that this rank finished."""
    samples: tuple[int, ...]
    """Ids of the samples of its microbatches, in their order."""
    layers: tuple[int, ...]
    """Blocks that it ran forward."""
    bytes_sent: Mapping[str, int]
    """Bytes sent, by axis."""
    bytes_far: Mapping[str, int]
    """Bytes of them sent to ranks on other nodes, by axis."""
    bytes_held: Mapping[str, int]
    """Bytes held after the step, by term."""
    actions: tuple[str, ...]
    """Pipeline actions, in their order."""
    routing: RecordedRouting | None
    """Where tokens were sent; nothing of a dense model."""


class EngineSubject:
    """Run a TrainEngine for the prover, keeping each step's gradients before they are clipped."""

    def __init__(
        self,
        plan: Plan,
        place: RankContext,
        completion: Completion | None = None,
        *,
        pieces: PieceSizes = TRAINING_PIECES,
        tells_activations: bool = True,
    ) -> None:
        """Build this rank's part of `plan`, which works in `pieces`.

        `completion` says when its operations complete. What passes between the parts of the model
        is kept to be told, unless `tells_activations` is False: it takes memory.
        """
        self.events = EventList()
        clock = clock_of(place.device)
        recorder = Recorder(place.rank, self.events, place.progress, clock)
        self.engine = make_engine(plan, recorder, place.device, completion, pieces=pieces)
        self.engine.on_gradients = self._keep_gradients
        self._islands = self.engine.parts.find(ElasticOuterSteps)
        if isinstance(self.engine, AsynchronousServer):
            self.engine.keeps_order = True
        self._routes = RoutingRecorder(self.engine)
        self._activations = ActivationRecorder(self.engine) if tells_activations else None
        self._scale = 1.0
        self._gradients: dict[str, list[Shard]] = {}

    def step(self, batch: BatchRows, step: int) -> EngineReport:
        """Take one optimizer step on this rank's rows of `batch`."""
        counted = int((batch.labels_BT != IGNORED_LABEL).sum())
        self.engine.tokens_of_step = lambda _: counted
        batches: list[TokenBatch] = []
        if self.engine.computes:
            runs = self.engine.runs_for(batch.inputs_BT.shape[1])
            batches = rank_batches(self.engine.plan, batch, self.engine.data_rank, step, runs=runs)
        ran: dict[int, None] = {}
        handles = [
            block.register_forward_pre_hook(partial(_note, ran, int(name)))
            for stage in self.engine.model.stages.values()
            for name, block in stage.layers.items()
        ]
        self.events.events.clear()
        self.engine.groups.recorder.far_bytes.clear()
        self._routes.start_step()
        if self._activations is not None:
            self._activations.start_step()
        result = self.engine.step(batches, step)
        # What a step sends while the next one runs belongs to this one.
        with self.engine.groups.completion.observing():
            held = held_bytes(self.engine)
            self.engine.groups.recorder.settle()
        for handle in handles:
            handle.remove()
        samples = tuple(int(i) for one in batches for i in one.sample_ids_B)
        return EngineReport(
            loss=result.loss,
            tokens=result.tokens,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            microbatch_losses=result.microbatch_losses,
            samples=samples,
            layers=tuple(ran),
            bytes_sent=self.events.bytes_by_axis(),
            bytes_far=dict(self.engine.groups.recorder.far_bytes),
            bytes_held=held,
            actions=tuple(e.name for e in self.events.events if e.kind in set(ActionKind)),
            routing=self._routes.step_routing(result),
        )

    def gradients(self) -> Mapping[str, Sequence[Shard]]:
        """Return the gradients of the last step, reduced and not clipped."""
        return self._gradients

    def parameters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the parameters as the next forward would read them."""
        return self.engine.parameters()

    def masters(self) -> Mapping[str, Sequence[Shard]]:
        """Return the values that the optimizer updates."""
        return self.engine.masters()

    def activations(self) -> Iterator[RecordedActivation]:
        """Yield what passed between the parts of the blocks here in the last step."""
        for one in () if self._activations is None else self._activations.recorded():
            values = _unscaled(one.values_nW, self._scale) if one.gradient else one.values_nW
            yield replace(one, values_nW=values)

    def watch_sums(self, see: SeeSum) -> None:
        """Let `see` compare each sum of codes: its group, its bucket, own part, and the slice."""
        model, groups = self.engine.model, self.engine.groups
        buckets = {f"gradients.{bucket.name}": bucket for bucket in model.buckets}
        for expert, sums in model.reduction.quantised.items():
            _, shard = groups.data_groups(expert=expert)
            sums.watch = partial(_see, see, shard, buckets)

    def state(self) -> Mapping[str, Mapping[str, Sequence[Shard]]]:
        """Return the state of the optimizer, by kind."""
        return self.engine.state()

    def step_parts(self) -> Mapping[str, Mapping[str, Sequence[Shard]]]:
        """Return the proven values of the step parts, by kind."""
        return self.engine.parts.proven()

    def applied(self) -> Sequence[AppliedGradient]:
        """Return the gradients that an asynchronous server applied, in order; others none."""
        return self.engine.applied if isinstance(self.engine, AsynchronousServer) else ()

    def begin(self, place: RankContext, num_steps: int) -> int:
        """Begin a run that goes on without lost islands, or come into it; return the steps done."""
        assert self._islands is not None, "another run begins with its first step"
        parts = self.engine.parts
        come_in = parts.connect(place, MESSAGE_S, num_steps)
        if come_in is not None:
            done = come_in()
            if done is None:
                return num_steps
            self.engine.refresh(slices=True)
            return done
        parts.begin(0)
        return 0

    def met(self, step: int) -> tuple[list[int], list[int], int] | None:
        """Return which islands met after so many steps, which came in, and how often it failed.

        None where none met, or none may be lost.
        """
        met = None if self._islands is None else self._islands.met_after(step)
        if met is None:
            return None
        return sorted(met.members), sorted(met.joins), int(met.key.rsplit("/", 1)[1])

    def die_at_meeting(self, step: int) -> None:
        """Have this rank killed in the meeting after so many steps, when it has begun to send."""
        assert self._islands is not None, "the run goes on without it"

        def end(done: int) -> None:
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)

        self._islands.on_sums = end

    def wait_for_return(self, step: int, islands: int, limit_s: float) -> None:
        """Let the meeting after so many steps wait for all `islands`, at most so long."""
        assert self._islands is not None, "islands come back"
        began: list[float] = []

        def holds(meeting: Meeting) -> bool:
            if meeting.step != step or len(meeting.members) + len(meeting.joins) == islands:
                return False
            began.append(time.monotonic())
            return time.monotonic() - began[0] < limit_s

        self._islands.meetings.holds = holds

    def close(self) -> dict[str, int]:
        """Give back what rests outside of the device; return the bytes sent since the last step."""
        self.events.events.clear()
        self.engine.close()
        return self.events.bytes_by_axis()

    def _keep_gradients(self) -> None:
        """Keep copies without the loss scale, in a dtype that can hold them."""
        scale = self._scale = self.engine.loss_scale.value
        self._gradients = {
            name: [replace(shard, tensor=_unscaled(shard.tensor, scale)) for shard in shards]
            for name, shards in self.engine.gradients().items()
        }


SeeSum = Callable[[Group, Bucket, torch.Tensor, torch.Tensor], None]


def _see(
    see: SeeSum,
    group: Group,
    buckets: Mapping[str, Bucket],
    name: str,
    whole: torch.Tensor,
    total: torch.Tensor,
) -> None:
    see(group, buckets[name], whole, total)


def _unscaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 1.0:
        return tensor.clone()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide) / scale


def _note(ran: dict[int, None], index: int, _module: object, _inputs: object) -> None:
    ran.setdefault(index)


def rank_batches(
    plan: Plan, batch: BatchRows, data_rank: int, step: int, *, runs: Sequence[PositionRun] = ()
) -> list[TokenBatch]:
    """Return the microbatches of one data-parallel rank: the positions of `runs`, or all."""
    size, num_microbatches = plan.layout.microbatch_sequences, plan.num_microbatches
    batches: list[TokenBatch] = []
    for microbatch in range(num_microbatches):
        start = (data_rank * num_microbatches + microbatch) * size
        rows = slice(start, start + size)
        whole = TokenBatch.from_rows(
            batch.inputs_BT[rows],
            batch.labels_BT[rows],
            torch.tensor(batch.sample_ids[rows]),
            step=step,
            seed=plan.mathematics.seed,
        )
        documents = None if batch.documents is None else batch.documents[rows]
        batches.append(whole.cut(runs, documents))
    return batches


def build(place: RankContext, plan: Plan, completion: Completion | None = None) -> EngineSubject:
    """Return this rank of `plan` as a subject, every loop over pieces of which runs several times.

    A small model is one piece of the sizes that training takes.
    """
    return EngineSubject(plan, place, completion, pieces=PROOF_PIECES)


def build_as_trained(place: RankContext, plan: Plan) -> EngineSubject:
    """Return this rank of `plan` as a subject that takes the memory that training takes."""
    return EngineSubject(plan, place, tells_activations=False)


CODES_TERM, SECONDARY_TERM = "codes of parameters", "secondary slices"
MASTER_PARAMETERS_TERM, OPTIMIZER_STATE_TERM = "master parameters", "optimizer state"


def held_bytes(engine: TrainEngine) -> dict[str, int]:
    """Return the bytes between steps by name of term (`cost.bytes_held`), over all pools."""
    engine.model.gathering.settle()
    buckets = engine.model.buckets
    values = [(one.values, one.value_slice, one.values_memory.present) for one in buckets]
    gradients = [
        (one.gradients, one.gradient_slice, one.gradients_memory.present) for one in buckets
    ]
    found = {
        name: storage_bytes(
            tensor
            for whole, piece, present in places
            for tensor in (whole, piece)
            if tensor is not whole or present
        )
        for name, places in (("parameters", values), ("gradients", gradients))
    }
    fp8 = [one.fp8 for one in buckets if one.fp8 is not None]
    found[CODES_TERM] = storage_bytes(part for one in fp8 for part in (one.codes, one.scales))
    found[SECONDARY_TERM] = storage_bytes(engine.model.gathering.secondary.tensors)
    found |= {MASTER_PARAMETERS_TERM: 0, OPTIMIZER_STATE_TERM: 0}
    for term, tensors in engine.parts.held().items():
        found[term] = storage_bytes(tensors)
    for kind, flats in engine.optimizer.state().items():
        found[MASTER_PARAMETERS_TERM if kind == "master" else OPTIMIZER_STATE_TERM] += (
            storage_bytes(flats.values())
        )
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}
