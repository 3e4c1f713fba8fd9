"""torchtitan saves a Llama 3 that FSDP2 shards, or loads one; or FSDP2 a Llama of transformers.

`torchtitan_case.py save|load titan|fused|plain FOLDER`, under torch.distributed.run. Logits lie in
FOLDER/logits.pt.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from bench.interop.model import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LENGTH,
    POSITIONS,
    VOCAB,
    asked,
    llama,
    rank,
)


def _titan(fused: bool) -> Any:
    sys.path.append(str(Path(sys.prefix).parent / "triton"))
    import torchtitan.tools.utils as titan

    titan.device_type, titan.device_module = "cpu", torch.cpu
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda *_, **__: ScaledDotProductAttention.Config()
    rope = ComplexRoPE.Config(
        dim=HIDDEN // HEADS, max_seq_len=POSITIONS, theta=10000, scaling="none"
    )
    config = llama3.Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=HIDDEN,
            out_features=VOCAB,
            param_init=llama3._output_linear_init(HIDDEN),
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=fused,
            n_layers=LAYERS,
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            hidden_dim=FFN,
            attn_backend="sdpa",
            rope=rope,
        ),
    )
    parallel = ParallelismConfig(data_parallel_shard_degree=dist.get_world_size())
    training = TrainingConfig(local_batch_size=1, seq_len=LENGTH, steps=1)
    config.update_from_config(
        config=types.SimpleNamespace(parallelism=parallel, training=training, debug=None)
    )
    torch.manual_seed(5)
    model = config.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for layer in model.layers.values():
        fully_shard(layer)
    return fully_shard(model)


def _plain() -> Any:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    """Save or load, and write logits."""
    action, kind, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    model = _plain() if kind == "plain" else _titan(kind == "fused")
    # torchtitan saves the weights of a model without a name before them, others under one.
    state = get_model_state_dict(model) if kind == "plain" else model.state_dict()
    if action == "save":
        dcp.save({"model": state} if kind == "plain" else state, checkpoint_id=folder)
    else:
        for value in state.values():
            value.fill_(float("nan"))
        dcp.load(state, checkpoint_id=folder)
        if kind == "plain":
            set_model_state_dict(model, state)
        else:
            model.load_state_dict(state)
    ids = asked()
    with torch.no_grad():
        if kind == "plain":
            logits = model(input_ids=ids).logits
        else:
            positions = torch.arange(ids.shape[1])[None]
            logits = model(ids, positions=positions)
    if rank() == 0:
        torch.save(logits.float().clone(), f"{folder}/logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
