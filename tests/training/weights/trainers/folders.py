"""Folders as trainers write them, by the rules of their formats, without those trainers."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from echelon.core.model_shape import ModelShape
from tests.training.weights.hugging_face import Tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def moment(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what an optimizer would keep of a weight."""
    return tensor * (0.5 if kind == "exp_avg" else 0.25)


def deepspeed_zero(folder: Path, tensors: Tensors, stage: int, ranks: int, step: int = 3) -> Path:
    """Write a folder of DeepSpeed with two groups of parameters; return that of the tag.

    Up to stage 2 a group lies end to end, padded to 2 x ranks, one part for each rank. At stage 3
    each parameter is padded and cut.
    """
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    groups = [
        {name: one for name, one in tensors.items() if (one.dim() > 1) == matrices}
        for matrices in (True, False)
    ]
    module: dict[str, Any] = {
        "module": OrderedDict((name, one.bfloat16()) for name, one in tensors.items()),
        "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in groups],
        "shared_params": {},
        "global_steps": step + 1,
        "skipped_steps": 1,
    }
    if stage <= 2:
        torch.save(module, tag / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        if stage == 3:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save({**module, "module": OrderedDict()}, tag / name)
        state = {
            kind: [_part(group, kind, stage, rank, ranks) for group in groups]
            for kind in ("fp32", *MOMENTS)
        }
        kept = {
            place: {kind: state[kind][place] for kind in MOMENTS} for place in range(len(groups))
        }
        found: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            found |= {"fp32_flat_groups": state["fp32"], "optimizer_state_dict": {"state": kept}}
        else:
            found |= {
                "partition_count": [ranks, ranks],
                "single_partition_of_fp32_groups": state["fp32"],
                "base_optimizer_state": {"state": kept},
            }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": found}, tag / name)
    return tag


def _part(group: Tensors, kind: str, stage: int, rank: int, ranks: int) -> torch.Tensor:
    values = [(one if kind == "fp32" else moment(one, kind)).flatten() for one in group.values()]
    if stage <= 2:
        return _padded(torch.cat(values), 2 * ranks).chunk(ranks)[rank].clone()
    return torch.cat([_padded(one, ranks).chunk(ranks)[rank] for one in values])


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % multiple), value=float("nan"))


def megatron_layer(shape: ModelShape, tensors: Tensors, layer: int) -> Tensors:
    """Return a block as Megatron-core has it, from one in the names of transformers' Llama."""
    block, head = f"model.layers.{layer}", shape.head_dim
    q, k, v = (tensors[f"{block}.self_attn.{name}_proj.weight"] for name in "qkv")
    turns = zip(q.chunk(shape.kv_heads), k.split(head), v.split(head), strict=True)
    gate, up = (tensors[f"{block}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    return {
        "self_attention.linear_qkv.layer_norm_weight": tensors[f"{block}.input_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat([one for turn in turns for one in turn]),
        "self_attention.linear_proj.weight": tensors[f"{block}.self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": tensors[f"{block}.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat((gate, up)),
        "mlp.linear_fc2.weight": tensors[f"{block}.mlp.down_proj.weight"],
    }


def megatron_ends(tensors: Tensors, padding: int) -> Tensors:
    """Return what stands before and after the blocks, with words of padding."""

    def padded(one: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(one, (0, 0, 0, padding), value=float("nan"))

    return {
        "embedding.word_embeddings.weight": padded(tensors["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": padded(tensors["lm_head.weight"]),
    }


def megatron_ranks(folder: Path, shape: ModelShape, tensors: Tensors, tp: int, pp: int) -> Path:
    """Write an older folder of Megatron-core; return that of the iteration."""
    place = folder / "iter_0000012"
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    ends, count = megatron_ends(tensors, 8 * tp - shape.vocab % (8 * tp)), shape.layers // pp
    for stage in range(pp):
        held: Tensors = {}
        for layer in range(count):
            found = megatron_layer(shape, tensors, stage * count + layer)
            held |= {f"decoder.layers.{layer}.{key}": one for key, one in found.items()}
        if stage == 0:
            held["embedding.word_embeddings.weight"] = ends["embedding.word_embeddings.weight"]
        if stage == pp - 1:
            held |= {key: one for key, one in ends.items() if not key.startswith("embedding")}
        for rank in range(tp):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            (place / name).mkdir(parents=True)
            model = {key: megatron_cut(key, one, tp, rank) for key, one in held.items()}
            content = {"model": model, "iteration": 12, "checkpoint_version": 3.0}
            torch.save(content, place / name / "model_optim_rng.pt")
    return place


def megatron_cut(key: str, one: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return what a tensor rank holds of a tensor."""
    if key.endswith("norm_weight") or key.endswith("layernorm.weight"):
        return one
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return one.chunk(tp, dim=1)[rank].clone()
    if key.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in one.chunk(2)])
    return one.chunk(tp)[rank].clone()
