"""torchtitan saves a Llama 3 that FSDP2 shards, or loads one; or FSDP2 a Llama of transformers.

`torchtitan_case.py save|load titan|fused|plain|moe FOLDER`, under torch.distributed.run. Logits lie
in FOLDER/logits.pt; of a Qwen 3 with experts what torchtitan's own adapter makes of its weights for
transformers lies in FOLDER/adapted.pt, for its grouped products want a GPU.
"""
# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

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

from tests.training.weights.peers.model import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LENGTH,
    POSITIONS,
    TOP_K,
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


def _titan_moe() -> tuple[Any, Any]:
    """Return a Qwen 3 with experts and what makes its weights those of transformers."""
    sys.path.append(str(Path(sys.prefix).parent / "triton"))
    import torchtitan.tools.utils as titan

    titan.device_type, titan.device_module = "cpu", torch.cpu
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    qwen3.get_attention_config = lambda *_, **__: ScaledDotProductAttention.Config()
    rope = CosSinRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=POSITIONS, theta=10000)
    config = qwen3.Qwen3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        norm=qwen3._qwen3_norm(HIDDEN),
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=HIDDEN, out_features=VOCAB, param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_moe_layers(
            fuse_qkv=False,
            n_layers=LAYERS,
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=HIDDEN // HEADS,
            moe_hidden_dim=FFN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            attn_backend="sdpa",
            moe_comm_backend="standard",
            rope=rope,
        ),
    )
    torch.manual_seed(5)
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model, Qwen3StateDictAdapter(config, None)


def _adapt(action: str, folder: str) -> None:
    """Save or load a Qwen 3 with experts; write its weights as transformers has them."""
    model, adapter = _titan_moe()
    state = {key: value for key, value in model.state_dict().items() if "expert_bias" not in key}
    if action == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        for value in state.values():
            value.fill_(float("nan"))
        dcp.load(state, checkpoint_id=folder)
    adapted = {key: value.clone() for key, value in adapter.to_hf(dict(state)).items()}
    if rank() == 0:
        torch.save(adapted, f"{folder}/adapted.pt")
    dist.barrier()


def _plain() -> Any:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    """Save or load, and write logits."""
    action, kind, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    if kind == "moe":
        _adapt(action, folder)
        return
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
