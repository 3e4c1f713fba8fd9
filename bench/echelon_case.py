"""Echelon as one more case: the plan of a mode, run by the engine that trains and is proven."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.data import global_batch
from bench.peers.llama import join
from bench.spec import Mode, Settings, Size, StepFunction
from echelon.config.resolve import split_layers
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.event import EventList
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Layout, Mathematics, Optimizer, Pipeline, Plan
from echelon.models.batch import TokenBatch
from echelon.parallel.recorder import Recorder
from echelon.train.engine import TrainEngine
from echelon.train.subject import rank_batches


@dataclass(slots=True, kw_only=True)
class _Rows:
    """A whole global batch, as `rank_batches` reads it."""

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor


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
        return rank_batches(self.plan, rows, self.engine.data_rank, number)


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    return EchelonStep(settings)


def recorded_bytes(step: EchelonStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes per axis that the engine says it sent since the last reset."""
    if reset:
        step.events.events.clear()
    return step.events.bytes_by_axis()


def bench_plan(settings: Settings) -> Plan:
    """Return the plan of a case: the peers' model, optimizer and split."""
    size, mode = settings.size, settings.mode
    return Plan(
        name=f"bench-{mode.name}",
        mathematics=Mathematics(
            model=_shape(size),
            global_sequences=size.global_sequences,
            sequence_length=size.sequence,
            seed=settings.seed,
            optimizer=Optimizer(
                learning_rate=settings.learning_rate,
                beta2=0.999,
                weight_decay=settings.weight_decay,
                clip_norm=None,
                schedule="constant",
            ),
        ),
        layout=Layout(
            mesh=Mesh(pp=mode.pp, dp_replicate=mode.dp, tp=mode.tp),
            microbatch_sequences=size.global_sequences // (mode.dp * mode.microbatches),
            pipeline=Pipeline(schedule="1f1b", stages=split_layers(size.layers, mode.pp)),
            sequence_parallel=mode.sequence_parallel,
        ),
        cluster=_this_machine(mode),
    )


def _shape(size: Size) -> ModelShape:
    return ModelShape(
        name=f"bench-{size.name}",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        ffn=size.ffn,
        vocab=size.vocab,
        max_positions=size.sequence,
    )


def _this_machine(mode: Mode) -> Cluster:
    """Return a cluster of one CPU node; nothing in a step depends on its speeds."""
    ranks = mode.world_size
    return Cluster(
        name="bench",
        device=Device(name="cpu", memory_bytes=8 * 2**30, memory_bandwidth=10e9),
        devices_per_node=ranks,
        nodes=1,
        links=(Link(name="loopback", degree=ranks, bandwidth=1e9, latency_s=1e-4),),
        backend="gloo",
    )
