"""Our engine as the thing under proof (`echelon.train.subject:build`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from echelon.core.attention_mask import DocumentStarts, Run
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.parallel.device_clock import clock_of
from echelon.parallel.recorder import Recorder, WaitMarks
from echelon.parallel.shards import Shard
from echelon.schedule.action import ActionKind
from echelon.train.engine import StepResult, TrainEngine
from echelon.train.live import held_bytes
from echelon.train.routes import RouteNotes, StepRouting


class GlobalRows(Protocol):
    """A whole global batch, one sequence per row (the prover's `GlobalBatch` is one)."""

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


class RankPlace(Protocol):
    """What is asked of a rank's context."""

    @property
    def rank(self) -> int:
        """The rank in the world."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def progress(self) -> WaitMarks:
        """Whom it tells when it waits for others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Say what one rank did in one step."""

    result: StepResult
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    bytes_sent: Mapping[str, int]
    bytes_held: Mapping[str, int]
    actions: tuple[str, ...]
    routing: StepRouting | None

    @property
    def loss(self) -> float:
        """Return the mean loss of the global batch."""
        return self.result.loss

    @property
    def tokens(self) -> int:
        """Return the counted tokens of the global batch."""
        return self.result.tokens

    @property
    def grad_norm(self) -> float:
        """Return the norm of the whole gradient before clipping."""
        return self.result.grad_norm

    @property
    def skipped(self) -> bool:
        """Return whether a gradient overflowed and nothing was updated."""
        return self.result.skipped

    @property
    def loss_scale(self) -> float:
        """Return the factor of the loss in the backward of this step."""
        return self.result.loss_scale

    @property
    def microbatch_losses(self) -> Mapping[tuple[int, int], tuple[float, int]]:
        """Return (loss sum, counted tokens) of each microbatch that this rank finished."""
        return self.result.microbatch_losses


class EngineSubject:
    """Run a TrainEngine for the prover, keeping each step's gradients before they are clipped."""

    def __init__(self, plan: Plan, place: RankPlace) -> None:
        """Build this rank's part of `plan`."""
        self.events = EventList()
        clock = clock_of(place.device)
        recorder = Recorder(place.rank, self.events, place.progress, clock)
        self.engine = TrainEngine(plan, recorder, place.device)
        self.engine.on_gradients = self._keep_gradients
        self._routes = RouteNotes(self.engine)
        self._gradients: dict[str, list[Shard]] = {}

    def step(self, batch: GlobalRows, step: int) -> EngineReport:
        """Take one optimizer step on this rank's rows of `batch`."""
        runs = self.engine.runs_of(batch.inputs_BT.shape[1])
        batches = rank_batches(self.engine.plan, batch, self.engine.data_rank, step, runs=runs)
        ran: dict[int, None] = {}
        handles = [
            block.register_forward_pre_hook(partial(_note, ran, int(name)))
            for stage in self.engine.model.stages.values()
            for name, block in stage.layers.items()
        ]
        self.events.events.clear()
        self._routes.start_step()
        result = self.engine.step(batches, step)
        # What a step sends while the next one runs belongs to this one.
        self.engine.model.residency.settle()
        for handle in handles:
            handle.remove()
        samples = tuple(int(i) for one in batches for i in one.sample_ids_B)
        return EngineReport(
            result=result,
            samples=samples,
            layers=tuple(ran),
            bytes_sent=self.events.bytes_by_axis(),
            bytes_held=held_bytes(self.engine),
            actions=tuple(e.name for e in self.events.events if e.kind in set(ActionKind)),
            routing=self._routes.said(result),
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

    def state(self) -> Mapping[str, Mapping[str, Sequence[Shard]]]:
        """Return the state of the optimizer, by kind."""
        return self.engine.state()

    def close(self) -> None:
        """Give back what rests outside of the device."""
        self.engine.close()

    def _keep_gradients(self) -> None:
        """Keep copies without the loss scale, in a dtype that can hold them."""
        scale = self.engine.loss_scale.value
        self._gradients = {
            name: [replace(shard, tensor=_unscaled(shard.tensor, scale)) for shard in shards]
            for name, shards in self.engine.gradients().items()
        }


def _unscaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 1.0:
        return tensor.clone()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide) / scale


def _note(ran: dict[int, None], index: int, _module: object, _inputs: object) -> None:
    ran.setdefault(index)


def rank_batches(
    plan: Plan, batch: GlobalRows, data_rank: int, step: int, *, runs: Sequence[Run] = ()
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


def build(place: RankPlace, plan: Plan) -> EngineSubject:
    """Return this rank of `plan` as a subject."""
    return EngineSubject(plan, place)
