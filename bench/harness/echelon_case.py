"""Echelon as one more case: the plan of a mode, run by the engine that trains and is proven."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.harness.data import global_batch
from bench.harness.plans import bench_plan
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join
from echelon.core.event import EventList
from echelon.launch.host import keep_freed_memory
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches


@dataclass(slots=True, kw_only=True)
class _Rows:
    """A whole global batch, as `rank_batches` reads it."""

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    documents: None = None


class EchelonStep:
    """Take the steps of one rank; keeps the events of the engine for `recorded_bytes`."""

    def __init__(self, settings: Settings) -> None:
        """Build this rank's part of the plan."""
        rank, _ = join(settings)
        self.settings = settings
        self.events = EventList()
        self.plan = bench_plan(settings)
        self.engine = TrainEngine(self.plan, Recorder(rank, self.events), torch.device("cpu"))

    def __call__(self, number: int) -> float:
        """Take optimizer step `number`; return the loss of the global batch."""
        return self.engine.step(self._batches(number), number).loss

    def _batches(self, number: int) -> list[TokenBatch]:
        inputs, labels = global_batch(self.settings, number)
        rows = _Rows(sample_ids=tuple(range(len(inputs))), inputs_BT=inputs, labels_BT=labels)
        runs, data_rank = self.engine.runs_for(inputs.shape[1]), self.engine.data_rank
        return rank_batches(self.plan, rows, data_rank, number, runs=runs)


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank, whose process keeps freed memory as those of our launcher do."""
    keep_freed_memory()
    return EchelonStep(settings)


def recorded_bytes(step: EchelonStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes per axis that the engine says it sent since the last reset."""
    if reset:
        step.events.events.clear()
    return step.events.bytes_by_axis()
