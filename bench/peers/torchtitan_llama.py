"""torchtitan 0.3: its Llama 3 and `parallelize_llama` in our loop.

Tensor with sequence parallelism, or variant "fsdp": its FSDP2 (HSDP where there are replicas).

Adaptations, all from outside: torchtitan picks "cuda" where no accelerator is found, so its
device is set before the rest of it is imported; it imports triton unconditionally, so
`setup_peers.sh` puts one beside the environment; 0.3 selects flex or varlen attention only,
neither of which trains on CPU, so its own SDPA module is put in their place. It also switches the
averaging of FSDP2 off, which is done here by the loss; Gloo needs plain sums for that.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bench.harness.data import rank_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join


def _config(settings: Settings, parallelism: Any, training: Any) -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda *_, **__: ScaledDotProductAttention.Config()
    size = settings.size
    rope = ComplexRoPE.Config(
        dim=size.hidden // size.heads, max_seq_len=size.sequence, theta=10000, scaling="none"
    )
    config = llama3.Llama3Model.Config(
        dim=size.hidden,
        vocab_size=size.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab,
            embedding_dim=size.hidden,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=size.hidden, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=size.hidden,
            out_features=size.vocab,
            param_init=llama3._output_linear_init(size.hidden),
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True,
            n_layers=size.layers,
            dim=size.hidden,
            n_heads=size.heads,
            n_kv_heads=size.kv_heads,
            hidden_dim=size.ffn,
            attn_backend="sdpa",
            rope=rope,
        ),
    )
    config.update_from_config(
        config=types.SimpleNamespace(parallelism=parallelism, training=training, debug=None)
    )
    return config


def _model(settings: Settings) -> tuple[Any, Any]:
    """Return (the split model with its own initial weights, its dimensions)."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.parallelize import parallelize_llama

    mode, size = settings.mode, settings.size
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=mode.dp_replicate if mode.zero_stage else 1,
        data_parallel_shard_degree=mode.dp_shard if mode.zero_stage else mode.dp,
        tensor_parallel_degree=mode.tp,
        fsdp_reshard_after_forward="never" if mode.zero_stage == 2 else "default",
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, mode.world_size)
    training = TrainingConfig(
        local_batch_size=size.global_sequences // mode.dp, seq_len=size.sequence, steps=100
    )
    training.mixed_precision_param = "float32"
    training.mixed_precision_reduce = "float32"
    config = _config(settings, parallelism, training)
    torch.manual_seed(settings.seed)
    with torch.device("meta"):
        model = config.build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="/tmp",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    model.train()
    return model, dims


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of dp x tp."""
    join(settings)
    sys.path.append(str(Path(sys.prefix).parent / "triton"))
    import torchtitan.tools.utils as titan

    titan.device_type, titan.device_module = "cpu", torch.cpu
    model, dims = _model(settings)
    optimizer = adamw(settings, model.parameters())
    mode, size = settings.mode, settings.size
    group = dims.get_mesh("tp").get_group() if mode.tp > 1 else None
    dp_rank = dist.get_rank() // mode.tp
    rows = size.global_sequences // mode.dp
    positions = torch.arange(size.sequence).unsqueeze(0).expand(rows, -1)

    def step(number: int) -> float:
        from torch.distributed.nn.functional import all_gather

        optimizer.zero_grad(set_to_none=True)
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        logits = model(inputs, positions=positions)
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        elif logits.shape[-1] != size.vocab:
            logits = torch.cat(all_gather(logits.contiguous(), group=group), dim=-1)
        loss = cross_entropy(logits, labels)
        (loss / mode.dp).backward()
        optimizer.step()
        return loss.item()

    return step
