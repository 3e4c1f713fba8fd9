"""megatron-core saves a GPTModel, or loads one: torch_dist, or a file for each rank.

`megatron_case.py save|load TP PP dist|legacy FOLDER [tied] [gpt2] [moe]`, under
torch.distributed.run on TP x PP ranks. Logits lie in FOLDER/logits.pt.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.megatron_cpu import pretend_cuda
from tests.training.weights.peers.model import (
    EPS,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    POSITIONS,
    TOP_K,
    VOCAB,
    asked,
    rank,
)

STEP = 7
LEGACY = "model_optim_rng.pt"


def _config(tp: int, pp: int, gpt2: bool, moe: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    function = torch.nn.functional
    kind: dict[str, Any] = {
        "gated_linear_unit": not gpt2,
        "activation_func": _gelu if gpt2 else function.silu,
        "add_bias_linear": gpt2,
        "normalization": "LayerNorm" if gpt2 else "RMSNorm",
        "num_query_groups": HEADS if gpt2 else KV_HEADS,
    }
    if moe:
        kind |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_ffn_hidden_size": FFN,
            "moe_shared_expert_intermediate_size": FFN,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            # In others the router asks Transformer Engine for its product.
            "moe_router_dtype": "fp64",
            # Shares of experts out of tensor ranks are gathered along the sequence.
            "sequence_parallel": tp > 1,
        }
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        layernorm_epsilon=EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        init_method_std=0.2,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **kind,
    )


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _model(tp: int, pp: int, tied: bool, gpt2: bool, moe: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(3)
    # A vocabulary that tensor ranks cannot share out is padded, as Megatron-LM does.
    padded = -(-VOCAB // (8 * tp)) * 8 * tp + 8 * tp
    return GPTModel(
        _config(tp, pp, gpt2, moe),
        get_gpt_layer_local_spec(
            num_experts=EXPERTS if moe else None,
            normalization="LayerNorm" if gpt2 else "RMSNorm",
        ),
        vocab_size=padded,
        max_sequence_length=POSITIONS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=tied,
        parallel_output=False,
    )


def _logits(model: Any, pp: int) -> torch.Tensor | None:
    """Return the logits on ranks of the last stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids = asked()
    found: list[torch.Tensor] = []

    def forward_step(batches: Iterator[torch.Tensor], part: Any) -> Any:
        one = next(batches)
        mask = torch.ones(1, 1, one.shape[1], one.shape[1]).triu(1).bool()
        positions = torch.arange(one.shape[1])[None]
        out = part(one, positions, mask)

        def keep(logits: torch.Tensor) -> Any:
            found.append(logits)
            return logits.sum(), {}

        return out, keep

    model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([ids]),
            model=[model],
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    last = parallel_state.is_pipeline_last_stage()
    return found[0][:, :, :VOCAB].float() if last and found else None


def _folder(root: Path, kind: str) -> Path:
    return root / f"iter_{STEP:07d}" if kind != "none" else root


def _rank_file(root: Path, pp: int) -> Path:
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return _folder(root, "legacy") / name / LEGACY


def _save(model: Any, root: Path, kind: str, pp: int) -> None:
    if kind == "dist":
        from megatron.core import dist_checkpointing

        folder = _folder(root, kind)
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = {**model.sharded_state_dict(prefix=""), "iteration": STEP}
        dist_checkpointing.save(state, str(folder))
    else:
        file = _rank_file(root, pp)
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "checkpoint_version": 3.0,
            "iteration": STEP,
            "model": model.state_dict_for_save_checkpoint(),
        }
        torch.save(state, file)
    if rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEP))


def _load(model: Any, root: Path, kind: str, pp: int) -> None:
    if kind == "dist":
        from megatron.core import dist_checkpointing

        state = model.sharded_state_dict(prefix="")
        loaded = dist_checkpointing.load(state, str(_folder(root, kind)))
        model.load_state_dict(loaded, strict=False)
        return
    loaded = torch.load(_rank_file(root, pp), weights_only=True)["model"]
    names = dict(model.state_dict())
    renamed = {_local(key): value for key, value in loaded.items()}
    missing = [key for key in names if key not in renamed and not key.endswith("_extra_state")]
    if missing or any(key not in names for key in renamed):
        raise KeyError(f"{missing} / {[key for key in renamed if key not in names]}")
    model.load_state_dict(renamed, strict=False)


def _local(key: str) -> str:
    """Return how the layers in pure torch call a norm that Transformer Engine fuses."""
    key = key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def main() -> None:
    """Save or load, and write logits."""
    action, tp, pp, kind, folder, *more = sys.argv[1:]
    dist.init_process_group("gloo")
    pretend_cuda()
    root = Path(folder)
    model = _model(int(tp), int(pp), "tied" in more, "gpt2" in more, "moe" in more)
    if action == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        _load(model, root, kind, int(pp))
    else:
        _save(model, root, kind, int(pp))
    logits = _logits(model, int(pp))
    if logits is not None and int(os.environ["RANK"]) == dist.get_world_size() - 1:
        torch.save(logits, root / "logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
