"""Echelon's pipeline as a case: any schedule and split, run by the engine that trains.

Where a folder for events is given, each rank writes there after every turn what it did and when,
on the clock that all processes of a machine share, so that ranks can be laid side by side.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from bench.harness.echelon_case import EchelonStep
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join
from bench.pipeline.plans import pipeline_plan
from bench.pipeline.spec import PipelineVariant
from echelon.core.event import EventList
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine

_EXCHANGES = 20


class PipelineStep(EchelonStep):
    """Take the steps of one rank; knows which events belong to which step."""

    def __init__(self, settings: Settings) -> None:
        """Build this rank's part of the plan, and time a message where that is asked for."""
        self.rank, _ = join(settings)
        self.settings = settings
        self.events = EventList()
        self.plan = pipeline_plan(settings)
        recorder = Recorder(self.rank, self.events)
        self.clock_zero = time.perf_counter() - recorder.now()
        self.engine = TrainEngine(self.plan, recorder, torch.device("cpu"))
        self.folder = PipelineVariant.parse(settings.variant).events
        self.transfer_s = self._time_message() if self.folder else 0.0
        self.steps: list[tuple[int, int]] = []

    def __call__(self, number: int) -> float:
        """Take optimizer step `number`; return the loss of the global batch."""
        first = len(self.events.events)
        loss = self.engine.step(self._batches(number), number).loss
        self.steps.append((number, first))
        return loss

    def write(self) -> None:
        """Write the steps since the last reset, with their events on the shared clock."""
        zero = self.clock_zero
        events = [replace(e, start=e.start + zero, end=e.end + zero) for e in self.events.events]
        ends = [first for _, first in self.steps[1:]] + [len(events)]
        steps = [
            {"number": number, "events": [asdict(event) for event in events[first:last]]}
            for (number, first), last in zip(self.steps, ends, strict=True)
        ]
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        text = json.dumps({"transfer_s": self.transfer_s, "steps": steps})
        (Path(self.folder) / f"rank-{self.rank}.json").write_text(text)

    def _time_message(self) -> float:
        """Return the seconds of one message between two stages: half of a round trip."""
        rows = self.plan.layout.microbatch_sequences * self.settings.size.sequence
        buffer = torch.zeros(rows, self.settings.size.hidden, dtype=torch.float32)
        taken: list[float] = []
        for _ in range(_EXCHANGES):
            start = time.perf_counter()
            if self.rank == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            elif self.rank == 1:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            taken.append((time.perf_counter() - start) / 2)
        return statistics.median(taken)


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return PipelineStep(settings)


def recorded_bytes(step: PipelineStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes per axis sent since the last reset; without one, also write the events."""
    if reset:
        step.events.events.clear()
        step.steps.clear()
    elif step.folder:
        step.write()
    return step.events.bytes_by_axis()
