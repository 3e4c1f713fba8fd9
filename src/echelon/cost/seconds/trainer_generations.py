# SPDX-License-Identifier: Apache-2.0
"""Trainers by generation.

The facts are of their code: what they overlap, in which dtype gradients add up and travel, what an
optimizer keeps. The numbers beside them (bytes of memory traffic, shares) were fitted to published
runs by `bench/accuracy/fit.py`, each generation as a whole; a trainer that nobody published
a run of has the middle of all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files

from echelon.core.choices.kernels import Kernels
from echelon.core.cluster import Cluster
from echelon.cost.bytes.nccl import nccl_facts
from echelon.cost.bytes.piece_traffic import kernel_facts
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.seconds.measured.kernels import measured_facts
from echelon.cost.seconds.trainer_memory import MEMORY

OURS = "echelon"
"""The trainer whose facts are those of our own engine."""
OVERLAPS = ("reduce_overlap", "gather_overlap", "tensor_overlap", "pipeline_overlap")
"""What a trainer hides behind compute."""
_WHOLE = ("fused_share", "reduce_share", "gather_share")

GENERIC = TrainerConstants(
    fused_share=0.8,
    width_bytes=50.0,
    inner_bytes=10.0,
    host_s=1.2e-5,
    logit_bytes=24.0,
    reduce_overlap=0.5,
    gather_overlap=0.85,
    gather_share=0.9,
    tensor_overlap=0.1,
    expert_overlap=0.2,
    pipeline_overlap=0.05,
    interference=0.1,
)
"""A trainer that is not known: eager kernels, gradients that travel behind half of backward."""

SAME_DTYPE_GRADIENTS = replace(GENERIC, gradient_bytes=2.0, reduced_bytes=2.0)
"""Gradients add up and travel in the dtype of parameters."""

LATE_CORE = replace(SAME_DTYPE_GRADIENTS, once_per_node=1.0, working_width=8.0, context_bytes=1.5e9)
"""Megatron-Core since 2025: a token crosses to a node once."""
COMPILED: Mapping[str, float] = {
    "width_bytes": 50.0,
    "inner_bytes": 9.0,
    "host_s": 2e-6,
    "mixture_s": 1e-4,
    "reduce_overlap": 0.8,
    "tensor_overlap": 0.2,
}
"""What a compiler of whole programs is known for: before any fit, and where no run tells more."""

UNFITTED_FRAMEWORKS: Mapping[str, TrainerConstants] = {
    # Of those that nobody tuned for a table, blocks are more kernels.
    "generic": replace(GENERIC, width_bytes=70.0, inner_bytes=13.0, kernels=60.0),
    # Its loss runs in backward (`parallel/vocabulary.py`).
    "echelon": replace(
        GENERIC, reduce_overlap=0.8, scattered_messages=0.0, loss_backward=1.0, own_operators=1.0
    ),
    # Up to 2023: gradients in fp32, nothing sent behind compute, masks of dropout kept.
    "megatron": replace(GENERIC, dropout=1.0),
    # DeepSpeed's engine: gradients in fp16, of which an update makes a copy in fp32.
    "megatron-deepspeed": replace(
        SAME_DTYPE_GRADIENTS, state_bytes=17.0, working_width=44.0, context_bytes=8e9, slack=0.0
    ),
    "megatron-core": replace(SAME_DTYPE_GRADIENTS, working_width=8.0, context_bytes=1.5e9),
    "megatron-core-2025": LATE_CORE,
    # Rows find their experts on the device, and graphs start the kernels of blocks.
    "megatron-core-2026": LATE_CORE,
    "deepspeed": replace(
        SAME_DTYPE_GRADIENTS, state_bytes=16.0, working_width=54.0, context_bytes=7e9
    ),
    # Since 2022 it gathers parameters of many weights at once, ahead of their use.
    "deepspeed-2022": replace(
        SAME_DTYPE_GRADIENTS,
        state_bytes=16.0,
        working_width=54.0,
        context_bytes=7e9,
        gather_share=0.6,
        gather_overlap=0.75,
        interference=0.3,
    ),
    # Composer's loss writes gradients of logits in the place of logits.
    "fsdp": replace(SAME_DTYPE_GRADIENTS, logit_held=4.0),
    "fsdp-compiled": SAME_DTYPE_GRADIENTS,
    "fsdp2": GENERIC,
    "fsdp2-compiled": GENERIC,
    # A program compiled as a whole (XLA): few kernels, operators fused, collectives beside compute.
    "jax": replace(SAME_DTYPE_GRADIENTS, **COMPILED),
    "internevo": replace(
        SAME_DTYPE_GRADIENTS, update_bytes=14.0, working_width=54.0, context_bytes=5e9, slack=0.0
    ),
}
"""What the code of each generation does: dtypes, and what it keeps."""

FITTED: Mapping[str, Mapping[str, float]] = tomllib.loads(
    (files("echelon.cost.seconds") / "fitted_trainers.toml").read_text(encoding="utf-8")
)
"""By generation, the constants that published runs tell."""

FRAMEWORKS: Mapping[str, TrainerConstants] = {
    key: replace(
        facts, host_updates=float(key != OURS), **MEMORY.get(key, {}), **FITTED.get(key, {})
    )
    for key, facts in UNFITTED_FRAMEWORKS.items()
}
"""Each generation of trainers, with the constants that published runs tell."""


def our_constants(cluster: Cluster, kernels: Kernels | None = None) -> TrainerConstants:
    """Return the facts of our own engine on the devices of a cluster, with `kernels`, if known."""
    return constants_on_devices(constants_of_trainer(OURS, cluster), cluster, kernels=kernels)


def constants_of_trainer(trainer: str, cluster: Cluster) -> TrainerConstants:
    """Return the constants of a generation of trainers, of which runs on such devices may tell.

    What was fitted to runs on GPUs says nothing of ours on processors.
    """
    on_processors = trainer == OURS and cluster.backend == "gloo"
    return (UNFITTED_FRAMEWORKS if on_processors else FRAMEWORKS)[trainer]


def constants_on_devices(
    software: TrainerConstants,
    cluster: Cluster,
    *,
    trainer: str = OURS,
    kernels: Kernels | None = None,
) -> TrainerConstants:
    """Return the facts of a trainer on the devices of a cluster, of ours with its `kernels`.

    The context that a device driver takes, and the buffers of NCCL, are there on GPUs only. On
    processors the host is the device, and what is sent is work of the cores that compute: nothing
    hides behind anything. What was measured there of our trainer counts more than what is usual.
    """
    if cluster.backend == "gloo":
        software = replace(
            software, context_bytes=0.0, host_adds=1.0, interference=0.0, by_pairs=1.0
        )
        software = replace(software, pace=1.0, hook_s=0.0)
        software = replace(software, adding_bytes=8.0, pair_hops=0.25)
        software = replace(software, **dict.fromkeys(OVERLAPS, 0.0), **dict.fromkeys(_WHOLE, 1.0))
    elif trainer == OURS:
        software = replace(software, gpu_kernels=1.0, **nccl_facts(cluster))
        software = replace(software, **measured_facts(cluster))
        if kernels is not None:
            software = replace(software, **kernel_facts(kernels))
    return replace(software, **dict(cluster.trainer)) if trainer == OURS else software
