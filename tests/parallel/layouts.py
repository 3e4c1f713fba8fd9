"""Small models and plans for tests: every setting has a value, changed by keyword."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from echelon.core.cluster import Cluster, Device
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, ModelShape
from echelon.core.plan import (
    Context,
    Documents,
    DType,
    Layout,
    Mathematics,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    TensorOverlapKind,
    Zero,
)

LAPTOP = Cluster(
    name="test",
    device=Device(name="cpu", memory_bytes=2**34, memory_bandwidth=1e10),
    devices_per_node=8,
    nodes=1,
    links=(),
    backend="gloo",
)

NANO = ModelShape(
    name="nano",
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    vocab=37,
    max_positions=16,
)
"""A Llama shape: an odd vocabulary (padded at every degree), two query heads to a key head."""

QWEN = replace(NANO, name="qwen", qk_norm=True, qkv_bias=True, tied=True)

GPT2 = replace(
    NANO,
    name="gpt2",
    kv_heads=4,
    gated=False,
    activation="gelu",
    tied=True,
    norm="layernorm",
    positions="learned",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)

STORE_ALL = Recompute()

STORE_WHOLE = Zero()

ONE_PIECE = Context()

WHOLE_EXPERTS = ExpertLayout()

NO_BALANCE = Balance()

MIXTRAL = replace(NANO, name="mixtral", layers=2, experts=Experts(num_experts=8, top_k=2, ffn=12))
"""A Mixtral shape: a softmax router, two of eight experts."""

DEEPSEEK = replace(
    MIXTRAL,
    name="deepseek",
    experts=Experts(
        num_experts=8,
        top_k=3,
        ffn=12,
        shared_experts=1,
        first_dense_layers=1,
        router="sigmoid",
        router_bias=True,
        gate_scale=2.5,
        groups=4,
        top_groups=2,
    ),
)
"""A DeepSeek-V3 router: sigmoid scores, groups, a bias, a shared expert, a dense block first."""

ADAMW = Optimizer(total_steps=8, clip_norm=0.5, eps=1e-3, warmup_steps=2)
"""An eps of the size of a gradient, so that an update shows its size and not only its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What tests vary of a plan; `stages` of None cuts the blocks as evenly as they go."""

    model: ModelShape = NANO
    pp: int = 1
    dp: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    experts: ExpertLayout = WHOLE_EXPERTS
    balance: Balance = NO_BALANCE
    context: Context = ONE_PIECE
    documents: Documents = "joined"
    sequence_parallel: bool = False
    tp_overlap: TensorOverlapKind = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    rows: tuple[str, ...] = ()
    microbatches: int = 2
    microbatch_sequences: int = 1
    sequence_length: int = 8
    stages: tuple[tuple[int, ...], ...] | None = None
    recompute: Recompute = STORE_ALL
    bucket_bytes: int = 4096
    dtype: DType = "fp64"
    precision: Precision | None = None
    zero: Zero = STORE_WHOLE
    optimizer: Optimizer = ADAMW


def plan_of(choice: Choice | None = None, **changes: Any) -> Plan:
    """Return the plan of a choice with some of it changed."""
    one = replace(choice or Choice(), **changes)
    return Plan(
        name="test",
        mathematics=Mathematics(
            model=one.model,
            global_sequences=(one.microbatches * one.microbatch_sequences * one.dp * one.dp_shard),
            sequence_length=one.sequence_length,
            documents=one.documents,
            seed=7,
            precision=one.precision
            or Precision(
                parameters=one.dtype, gradients=one.dtype, reduction=one.dtype, master=one.dtype
            ),
            optimizer=one.optimizer,
            balance=one.balance,
        ),
        layout=Layout(
            mesh=Mesh(
                pp=one.pp,
                dp_replicate=one.dp,
                dp_shard=one.dp_shard,
                cp=one.cp,
                tp=one.tp,
                ep=one.ep,
            ),
            microbatch_sequences=one.microbatch_sequences,
            pipeline=Pipeline(
                schedule=one.schedule,
                virtual_stages=one.virtual_stages,
                stages=one.stages or cut(one.model.layers, one.pp * one.virtual_stages),
                rows=one.rows,
            ),
            sequence_parallel=one.sequence_parallel,
            tp_overlap=one.tp_overlap,
            zero=replace(one.zero, bucket_bytes=one.bucket_bytes),
            recompute=one.recompute,
            context=one.context,
            experts=one.experts,
        ),
        cluster=LAPTOP,
    )


def cut(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each stage, in order, the first stages holding one more."""
    bounds = [-(-layers * s // stages) for s in range(stages + 1)]
    return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))
