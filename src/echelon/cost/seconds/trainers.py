# SPDX-License-Identifier: Apache-2.0
"""Constants of trainers by generation: facts of code, fitted numbers, and memory.

The facts are of their code: what they overlap, in which dtype gradients add up and travel, what an
optimizer keeps. The numbers beside them (bytes of memory traffic, shares) were fitted to published
runs by `bench/accuracy/fit.py`, each generation as a whole; a trainer that nobody published
a run of has the middle of all.

Memory that they hold on a device beside weights and activations is from their code.
Every number counts tensors of a project's own modules; none was fitted. In bytes a logit (V), or
for each token and width of `hidden` (h), of queries and keys, or of `ffn` (f):

    Megatron-Core     The loss keeps 2 V of logits while their fp32 copy becomes probabilities, then
                      gradients, in place: 2 + 4 (megatron.core.tensor_parallel.cross_entropy).
                      Transformer Engine keeps a norm's input and output, fc1's output and what the
                      activation makes of it (transformer_engine.pytorch.module.layernorm_linear and
                      linear): that is `closed_forms.py`; a norm of heads keeps its input; its
                      attention makes queries, keys and
                      values contiguous, so that their common projection goes. Backward of an MLP
                      has the gradients of 3 f beside. Workspaces of products are 32 MiB each: its
                      own (transformer_engine.pytorch.cpp_extensions.gemm), and cuBLAS's of the
                      threads that run forward and backward (torch: ATen CUDABlas, from Hopper on);
                      experts have one for each of four streams.
    Megatron, to 2022 `output.float()`, and `exp()` out of place: 2 + 4 + 4 (megatron.mpu).
    eager PyTorch     Logits, log-softmax in fp32, and two gradients of it: 2 + 4 + 4 + 4
                      (torch.nn.functional.cross_entropy). An RMSNorm keeps its input in fp32 and
                      the normed value beside what a linear layer keeps, 4 h more for each norm;
                      silu(gate) is kept beside gate, up and their product, 2 f; keys and values
                      are repeated, 2 bytes of each.
    compiled PyTorch  Kernels are fused, so that a block keeps what products need. Loss in one graph
                      with the head: logits, their gradient in fp32 and in 16 bits, 2 + 4 + 2.
    FSDP2             Parameters rest in fp32 as what the optimizer updates; gathered in 16 bits:
                      the block at work, the next, gradients, and their fp32 copy that is sent,
                      2 + 2 + 2 + 4, and both ends (torch.distributed.fsdp.fully_shard).
                      `zero_grad` frees gradients, so that backward makes them anew.
    DeepSpeed         Gradients wait in a bucket of 5e8 (deepspeed.runtime.zero.config), and an
                      update makes copies of them in fp32, 4 of each weight that it updates;
                      offloaded states take gradients with them (deepspeed.runtime.zero.stage3).
    nanotron          Logits in fp32 and their softmax, 4 + 4 (nanotron.parallel.tensor_parallel
                      .functional). silu(gate) is kept beside what it is multiplied with; rows of
                      attention are turned from [length, batch] to [batch, length] and back, keys
                      and values put together (nanotron.models.llama), by their norm in one kernel.
                      Gathered inputs wait whole, as its linear layers are PyTorch's. Gradients add
                      up in fp32 (nanotron.optim.gradient_accumulator).
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
from echelon.cost.seconds.kernels import measured_facts

Facts = Mapping[str, float]

CORE: Facts = {
    "logit_held": 6.0,
    "loss_apart": 1.0,
    "working_width": 4.0,
    "working_inner": 6.0,
    "saved_normed": 1.0,
    "workspace_bytes": 3.0 * 2.0**25,
    "grouped_workspace_bytes": 4.0 * 2.0**25,
    "slack": 0.06,
    "context_bytes": 3.0e9,
}
"""Megatron-Core with Transformer Engine."""
EAGER: Facts = {
    "logit_held": 14.0,
    "loss_apart": 1.0,
    "late_gradients": 1.0,
    "working_width": 8.0,
    "working_inner": 8.0,
    "saved_width": 8.0,
    "saved_inner": 2.0,
    "saved_repeats": 4.0,
    "saved_normed": 1.0,
}
"""PyTorch without a compiler: its loop, and libraries that run a model as it is written."""
COMPILED_GRAPH: Facts = {
    "logit_held": 8.0,
    "loss_apart": 1.0,
    "late_gradients": 1.0,
    "working_width": 4.0,
    "working_inner": 6.0,
    "saved_width": 0.0,
    "saved_inner": 0.0,
    "saved_repeats": 0.0,
    "saved_normed": 1.0,
}
"""PyTorch with blocks, or a whole step, compiled."""
SHARDED: Facts = {
    "parameter_bytes": 4.0,
    "state_bytes": 8.0,
    "gradient_bytes": 4.0,
    "gathered_bytes": 10.0,
    "slack": 0.08,
}
"""FSDP2 with mixed precision."""

ZERO: Facts = {
    **EAGER,
    "late_gradients": 0.0,
    "state_bytes": 12.0,
    "update_bytes": 4.0,
    "context_bytes": 3.0e9,
    "gathered_bytes": 8.0,
    "bucket_weights": 5e8,
    "offloads_gradients": 1.0,
}
"""DeepSpeed's ZeRO."""

NANOTRON: Facts = {
    "logit_held": 8.0,
    "loss_apart": 1.0,
    "working_width": 4.0,
    "working_inner": 6.0,
    "saved_inner": 2.0,
    "saved_joint": 4.0,
    "saved_turned": 2.0,
    "saved_whole": 1.0,
    "balances_head": 1.0,
    "gradient_bytes": 4.0,
    "state_bytes": 12.0,
}
"""nanotron, of huggingface/nanotron @6ad5994 (July 2024)."""

MEMORY: Mapping[str, Facts] = {
    "megatron": {"loss_apart": 1.0, "logit_held": 10.0},
    "megatron-core": CORE,
    "megatron-core-2025": CORE,
    "megatron-core-2026": CORE,
    "generic": EAGER,
    "deepspeed": {"offloads_gradients": 1.0},
    "deepspeed-2022": ZERO,
    "fsdp": {**EAGER, "offloads_gradients": 1.0},
    "fsdp-compiled": {**COMPILED_GRAPH, "offloads_gradients": 1.0},
    "fsdp2": {**EAGER, **SHARDED, "offloads_gradients": 1.0},
    "fsdp2-compiled": {**COMPILED_GRAPH, **SHARDED, "logit_held": 14.0, "offloads_gradients": 1.0},
}
"""By generation, facts over those of `trainers.py`."""

GEMINI: Facts = {"gradient_bytes": 0.0, "update_bytes": 0.0}
"""Colossal-AI's Gemini: gradients take the place of parameters, chunk by chunk, and its Adam reads
them there (colossalai.zero.gemini.gemini_ddp, reuse_fp16_chunk @0110902)."""

BY_NAME: Mapping[str, Facts] = {
    "nanotron": {**EAGER, "saved_width": 0.0, **NANOTRON},
    "gemini": GEMINI,
}
"""Facts of trainers whose memory is not that of their generation, by what is in their name."""


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
