# SPDX-License-Identifier: Apache-2.0
"""What trainers hold on a device beside weights and activations, by generation, from their code.

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

from collections.abc import Mapping

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
COMPILED: Facts = {
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
    "fsdp-compiled": {**COMPILED, "offloads_gradients": 1.0},
    "fsdp2": {**EAGER, **SHARDED, "offloads_gradients": 1.0},
    "fsdp2-compiled": {**COMPILED, **SHARDED, "logit_held": 14.0, "offloads_gradients": 1.0},
}
"""By generation, facts over those of `trainer_generations.py`."""

GEMINI: Facts = {"gradient_bytes": 0.0, "update_bytes": 0.0}
"""Colossal-AI's Gemini: gradients take the place of parameters, chunk by chunk, and its Adam reads
them there (colossalai.zero.gemini.gemini_ddp, reuse_fp16_chunk @0110902)."""

BY_NAME: Mapping[str, Facts] = {
    "nanotron": {**EAGER, "saved_width": 0.0, **NANOTRON},
    "gemini": GEMINI,
}
"""Facts of trainers whose memory is not that of their generation, by what is in their name."""
