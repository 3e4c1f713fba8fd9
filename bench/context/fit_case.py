"""One training step over a long sequence, by a rank whose resident memory may grow so far only.

What counts is how far the resident memory rises above that of an idle rank: one that has imported
everything, joined the others and taken a step with a tiny model. A watcher ends the rank once its
peak is over the limit, so weights, optimizer state, activations and buffers all count, whatever
allocates them. The first step has few positions, and makes the optimizer's state; the second one
has all of them.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.context.resident_memory import peak_resident_bytes, reset_peak, resident_bytes
from bench.context.spec import FitVariant
from bench.harness.data import global_batch
from bench.harness.echelon_case import EchelonStep
from bench.harness.plans import bench_plan
from bench.harness.spec import SIZES, Settings, StepFunction
from bench.peers.llama import join
from echelon.core.axis import Axis
from echelon.core.event import EventList
from echelon.core.plan import Plan, Recompute
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine

WATCH_EVERY_S = 0.02
SHORT = 64
CPU = torch.device("cpu")


class FitStep:
    """Take a short step and then the long one."""

    def __init__(self, settings: Settings) -> None:
        """Find out what an idle rank has, then build this rank's part of the plan."""
        torch.set_num_threads(settings.threads)
        self.rank, _ = join(settings)
        self.settings, self.variant = settings, FitVariant.parse(settings.variant)
        EchelonStep(replace(settings, size=SIZES["tiny"]))(0)
        gc.collect()
        reset_peak()
        self.base = resident_bytes()
        threading.Thread(target=self._watch, daemon=True).start()
        self.plan = fit_plan(settings)
        self.engine = TrainEngine(self.plan, Recorder(self.rank, EventList()), CPU)

    def __call__(self, number: int) -> float:
        """Take a short step first, then long ones."""
        batch = self._batch(SHORT if number == 0 else self.settings.size.sequence)
        loss = self.engine.step([batch], number).loss
        grown = {"grown_bytes": peak_resident_bytes() - self.base, "base_bytes": self.base}
        self._write("grown", json.dumps({**grown, "loss": loss}))
        return loss

    def _batch(self, length: int) -> TokenBatch:
        """Return this rank's part of one sequence."""
        size = replace(self.settings.size, sequence=length)
        inputs, labels = global_batch(replace(self.settings, size=size), 0)
        place = self.plan.mesh.coordinates(self.rank)[Axis.CP]
        runs = replace(self.plan.placement, length=length).runs(place)
        whole = TokenBatch.from_rows(inputs, labels, torch.zeros(1, dtype=torch.int64))
        return whole.cut(runs)

    def _watch(self) -> None:
        while peak_resident_bytes() - self.base <= self.variant.limit_bytes:
            time.sleep(WATCH_EVERY_S)
        self._write("over", "")
        os._exit(1)

    def _write(self, name: str, text: str) -> None:
        (Path(self.variant.folder) / f"{name}-{self.rank}.json").write_text(text)


def fit_plan(settings: Settings) -> Plan:
    """Return the plan of a case, with every block recomputed."""
    plan = bench_plan(settings)
    return replace(plan, layout=replace(plan.layout, recompute=Recompute(policy="full")))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return FitStep(settings)
