"""The layouts of data, tensor and pipeline parallelism that are proven, without ZeRO.

Data, tensor and pipeline degrees in {1, 2, 4} up to eight ranks, sequence parallelism, schedule,
even and uneven stages, tied and untied head, accumulation, recompute. The kind of model (norms,
biases, positions, head ratios, a vocabulary that `tp` does not divide, dropout) turns with the
case, so each meets each in the whole. Token counts are uneven everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from echelon.core.cluster import Cluster, Device
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape, RopeScaling
from echelon.core.plan import (
    Layout,
    Mathematics,
    Optimizer,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
)

MAX_WORLD = 8
DEGREES = (1, 2, 4)
SCHEDULES = ("naive", "gpipe", "1f1b")
POLICIES: tuple[RecomputePolicy, ...] = ("none", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one layout of the matrix."""

    dp: int
    tp: int
    pp: int
    sequence_parallel: bool
    schedule: str
    uneven_stages: bool
    tied: bool
    accumulation: int
    recompute: RecomputePolicy

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.schedule, "uneven" if self.uneven_stages else "even"] if self.pp > 1 else []
        parts += ["tied" if self.tied else "untied", f"acc{self.accumulation}", self.recompute]
        return "-".join(parts)

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return turn_of(self.name)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.pp

    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""
        return _plan(self)


def cases() -> Iterator[Case]:
    """Return every case of the matrix."""
    for dp, tp, pp in product(DEGREES, repeat=3):
        if dp * tp * pp > MAX_WORLD:
            continue
        for sequence_parallel, schedule, uneven, tied, accumulation, recompute in product(
            (False, True) if tp > 1 else (False,),
            SCHEDULES if pp > 1 else ("1f1b",),
            (False, True) if pp > 1 else (False,),
            (False, True),
            (1, 3),
            POLICIES,
        ):
            yield Case(
                dp=dp,
                tp=tp,
                pp=pp,
                sequence_parallel=sequence_parallel,
                schedule=schedule,
                uneven_stages=uneven,
                tied=tied,
                accumulation=accumulation,
                recompute=recompute,
            )


def turn_of(name: str) -> int:
    """Return a number that depends on `name` and on nothing else."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _plan(case: Case) -> Plan:
    microbatch = 1 + case.turn % 2
    layout = Layout(
        mesh=_mesh(case),
        microbatch_sequences=microbatch,
        pipeline=Pipeline(schedule=case.schedule, stages=_stages(case)),
        sequence_parallel=case.sequence_parallel,
        recompute=Recompute(policy=case.recompute, every=1 + case.turn // 2 % 2),
    )
    layers = sum(len(stage) for stage in layout.pipeline.stages)
    mathematics = Mathematics(
        model=turned_model(case.turn // 4, tp=case.tp, layers=layers, tied=case.tied),
        global_sequences=microbatch * case.dp * _num_microbatches(case),
        sequence_length=16,
        seed=case.turn % 1000,
        optimizer=turned_optimizer(case.turn),
    )
    return Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=one_machine())


def _mesh(case: Case) -> Mesh:
    """Give half of the cases a data axis of both kinds: they must be one and the same sum."""
    shard = 2 if case.dp == 4 and case.turn % 2 else 1
    return Mesh(pp=case.pp, dp_replicate=case.dp // shard, dp_shard=shard, tp=case.tp)


def _stages(case: Case) -> tuple[tuple[int, ...], ...]:
    counts = [1] * case.pp
    if case.pp == 1:
        counts = [2]
    elif case.uneven_stages:
        counts[case.turn % case.pp] = 2
    starts = [sum(counts[:stage]) for stage in range(case.pp)]
    return tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=True))


def _num_microbatches(case: Case) -> int:
    """Return the fewest microbatches (1F1B needs one per stage), or more, and not in step."""
    fewest = case.pp if case.schedule == "1f1b" else 1
    if case.accumulation == 1:
        return fewest
    return max(case.accumulation, fewest + 1)


def turned_optimizer(turn: int) -> Optimizer:
    """Return AdamW with a clip, a schedule and a warm-up that `turn` picks."""
    return Optimizer(
        clip_norm=None if turn % 11 == 0 else 1.0,
        schedule=("cosine", "linear", "wsd", "constant")[turn // 8 % 4],
        warmup_steps=turn // 32 % 2 * 10,
        total_steps=100,
    )


def turned_model(turn: int, *, tp: int, layers: int, tied: bool) -> ModelShape:
    """Return one of four kinds of model, that `turn` picks."""
    llama = ModelShape(
        name="matrix",
        layers=layers,
        hidden=32 * tp,
        heads=4 * tp,
        kv_heads=2 * tp,
        head_dim=8,
        ffn=16 * tp,
        vocab=24 * tp + 1,
        max_positions=16,
        tied=tied,
    )
    kind = turn % 4
    if kind == 0:
        return llama
    if kind == 1:
        return replace(
            llama,
            kv_heads=4 * tp,
            vocab=24 * tp,
            max_positions=32,
            gated=False,
            activation="gelu",
            norm="layernorm",
            positions="learned",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )
    if kind == 2:
        return replace(llama, kv_heads=tp, qk_norm=True, qkv_bias=True, head_dim=16)
    scaling = RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
    )
    return replace(llama, dropout=0.1, rope_scaling=scaling, rope_theta=100.0)


def one_machine() -> Cluster:
    """Return a cluster that has room for every case."""
    device = Device(name="cpu", memory_bytes=8 * 2**30, memory_bandwidth=1e10)
    return Cluster(
        name="this machine",
        device=device,
        devices_per_node=MAX_WORLD,
        nodes=1,
        links=(),
        backend="gloo",
    )
