"""The plan of a mode: the peers' model, optimizer and split in Echelon's words. No torch."""

from __future__ import annotations

from bench.harness.spec import Mode, Settings, Size
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Context, Layout, Mathematics, Optimizer, Pipeline, Plan, Zero
from echelon.cost.seconds.stages import split_layers


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
            mesh=Mesh(
                pp=mode.pp,
                dp_replicate=mode.dp_replicate,
                dp_shard=mode.dp_shard,
                cp=mode.cp,
                tp=mode.tp,
            ),
            context=Context(kind=mode.context, ulysses_degree=mode.ulysses_degree),
            microbatch_sequences=size.global_sequences // (mode.dp * mode.microbatches),
            pipeline=Pipeline(schedule=mode.schedule, stages=split_layers(size.layers, mode.pp)),
            sequence_parallel=mode.sequence_parallel,
            zero=Zero(
                stage=mode.zero_stage, accumulate="slices" if mode.zero_stage >= 2 else "whole"
            ),
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
