"""Plans of the nano model for exports: one from each corner of what tools can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.config.job import Job
from echelon.config.load import load_job

MESHES = (
    (),
    ("mesh.dp_replicate=4",),
    ("mesh.dp_shard=4", "zero.stage=1"),
    ("mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=3"),
    ("mesh.dp_shard=4", "zero.stage=3", "zero.prefetch=2", "zero.keep_whole_below=300"),
    ("mesh.dp_shard=4", "zero.stage=2", "zero.optimizer_offload=host"),
    ("mesh.tp=2", "model.vocab=258", "mesh.dp_shard=2", "zero.stage=3"),
    ("mesh.cp=2", "context.kind=ulysses", "mesh.dp_shard=2", "zero.stage=1"),
    ("mesh.cp=4", "context.kind=ulysses-ring", "zero.stage=1"),
    ("mesh.cp=2", "context.kind=gathered", "zero.stage=3"),
    ("mesh.pp=2", "mesh.tp=2", "model.vocab=258", "mesh.sequence_parallel=true"),
    ("mesh.pp=2", "pipeline.stages=[[0],[1,2,3]]", "mesh.dp_shard=2", "zero.stage=1"),
    ("mesh.pp=2", "pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2"),
    ("mesh.pp=2", "pipeline.schedule=zb-v", "mesh.dp_shard=2", "zero.stage=3"),
    ("mesh.dp_shard=16", "cluster.preset=16xh100", "zero.stage=3", "zero.secondary=true"),
)
BF16 = ("precision.parameters=bf16",)
ALL_BF16 = (*BF16, "precision.gradients=bf16", "precision.reduction=bf16")
FP16 = tuple(f"precision.{role}=fp16" for role in ("parameters", "gradients", "reduction"))
DECAY = "optimizer.decay=all"
NUMBERS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "megatron": (
        ("optimizer.final_ratio=0.3", "optimizer.learning_rate=0.0007"),
        (*BF16, "recompute.policy=full"),
        ALL_BF16,
        (*FP16, "precision.loss_scaling=dynamic", "precision.loss_scale_hysteresis=3"),
        ("optimizer.kind=muon", "optimizer.schedule=wsd", "optimizer.decay_steps=7"),
        ("model.window=64", "batch.documents=separate", "optimizer.schedule=linear"),
    ),
    "deepspeed": (
        ("optimizer.clip_norm=none", "optimizer.decay=blocks"),
        (*BF16, "recompute.policy=full", "recompute.every=2"),
        (*FP16, "precision.loss_scaling=dynamic", "precision.loss_scale=1024"),
        ("optimizer.kind=sgd", "optimizer.schedule=constant"),
        (*ALL_BF16, "optimizer.schedule=linear", "optimizer.final_ratio=0"),
    ),
    "torchtitan": (
        (DECAY, "optimizer.clip_norm=none", "train.seed=9"),
        (DECAY, *BF16, "recompute.policy=full", "recompute.every=2"),
        (DECAY, *BF16, "optimizer.schedule=wsd", "optimizer.decay_steps=30"),
        ("optimizer.weight_decay=0", "optimizer.schedule=constant"),
    ),
    "accelerate": (
        ("recompute.policy=full",),
        ("recompute.policy=full", "recompute.offload=host"),
        (*BF16, "precision.reduction=bf16"),
        ALL_BF16,
        ("optimizer.kind=muon",),
    ),
}
"""What changes numbers, as each tool can say it."""

_EXPERTS = (
    "model.tied=false",
    "model.experts.num_experts=8",
    "model.experts.top_k=2",
    "model.experts.ffn=64",
)
_LATENT = (
    "model.kv_heads=4",
    "model.latent.query_rank=48",
    "model.latent.kv_rank=32",
    "model.latent.nope_dim=16",
    "model.latent.rope_dim=8",
    "model.latent.value_dim=16",
)
EXPERTS = (
    (*_EXPERTS, *_LATENT, "model.experts.groups=4", "model.experts.top_groups=1"),
    (*_EXPERTS, "experts.balance=aux", "model.experts.shared_experts=1"),
    (*_EXPERTS, "mesh.ep=2", "mesh.dp_shard=4", "zero.stage=3", "optimizer.decay=all"),
    (*_EXPERTS, "mesh.ep=2", "mesh.dp_shard=2", "zero.stage=1", "experts.chunks=2"),
    (*_EXPERTS, "experts.balance=bias", "model.experts.router=sigmoid", "train.seed=3"),
    (*_EXPERTS, "experts.capacity_factor=1.5", "model.experts.first_dense_layers=1"),
)


def plans(to: str) -> list[tuple[str, ...]]:
    """Return the settings of each plan: meshes with the numbers of a tool in turn, and experts."""
    numbers = NUMBERS[to]
    count = range(len(MESHES))
    dense = [(*MESHES[i], *numbers[(i + j) % len(numbers)]) for i in count for j in range(2)]
    return [*dense, *EXPERTS]


def job_of(settings: Sequence[str]) -> Job:
    """Return a run of the nano model with these settings."""
    return load_job("nano", [*settings, "batch.global_sequences=32"])
