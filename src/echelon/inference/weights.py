# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a model to generate with: weights alone, in the fewest tensors.

Layers that read the same input lie one below the other in one tensor, so that one product makes all
of their outputs: with one token at a time the number of products is what takes time. Names and
shapes of parameters are those of training; whoever reads a checkpoint fills their rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from echelon.core.plan import Plan
from echelon.inference.operations import CacheOperations
from echelon.layout.stage import RankPart, held_experts, held_parameters
from echelon.models.decoder import MLP, Decoder, GroupedQueryAttention
from echelon.models.modules import EmptyLinear, TensorShare
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.weights import Shard, tensor_rank_rectangle

_ROW_LAYERS = ("o", "down")
"""The names of layers whose outputs ranks sum: their bias is added once, afterwards."""


def empty_decoder(
    plan: Plan, part: RankPart, groups: RankGroups, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Return the part of the model that a rank generates with, all zeros.

    Its operations have no cache yet.
    """
    mesh, layout = plan.mesh, plan.layout.experts
    fp8 = plan.mathematics.precision.is_fp8
    operations = CacheOperations(
        groups.tensor,
        splits_experts=mesh.tp > 1 and (mesh.ep > 1 or layout.expert_tp > 1),
        fp8=fp8,
    )
    (stage,) = part.stages
    with torch.device("meta"):
        decoder = Decoder(
            plan.model,
            operations=operations,
            blocks=stage.blocks,
            first=stage.first,
            last=stage.last,
            share=TensorShare(
                tp=mesh.tp, expert_tp=layout.expert_tp, experts=held_experts(plan, part)
            ),
        )
    like = torch.empty(0, dtype=dtype, device=device)
    if not fp8:
        for module in decoder.modules():
            for linears in _joined_layers(module):
                operations.joined[id(linears[0])] = _join(linears, like)
    for module in decoder.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if one.is_meta:
                setattr(module, name, _frozen(like.new_zeros(one.shape)))
    return decoder


def weight_shards(
    plan: Plan, part: RankPart, decoder: Decoder, groups: RankGroups
) -> dict[str, list[Shard]]:
    """Return the rectangles of the model's parameters that a rank holds, padding cut off."""
    held = dict(decoder.named_parameters())
    found: dict[str, list[Shard]] = {}
    for spec in held_parameters(plan, part):
        offset, size = tensor_rank_rectangle(spec, groups.tensor_group_for(spec))
        whole = held[spec.name].data
        tensor = whole[tuple(slice(0, one) for one in size)]
        if tensor.numel():
            found[spec.name] = [
                Shard(
                    name=spec.name,
                    global_shape=spec.shape,
                    offset=offset,
                    tensor=tensor,
                    primary=False,
                )
            ]
    return found


@torch.no_grad()
def merge_adapters(decoder: Decoder) -> None:
    """Add what adapters make to the weights below them, which then do all: W += s B A."""
    for module in decoder.modules():
        if isinstance(module, EmptyLinear) and module.lora is not None:
            a_RI, b_OR = module.lora_a.weight.data, module.lora_b.weight.data
            module.weight.data.addmm_(b_OR, a_RI, alpha=module.lora.scale)
            module.lora = None
            del module.lora_a, module.lora_b


def put_off_biases(decoder: Decoder) -> None:
    """Let the biases of layers whose outputs are summed be added after the sum."""
    operations = decoder.operations
    assert isinstance(operations, CacheOperations)
    if operations.group.size == 1:
        return
    for name, module in decoder.named_modules():
        # The biases of routed experts are weighted: whoever adds them up sees to it.
        routed = ".mlp.experts." in name
        if (
            isinstance(module, EmptyLinear)
            and name.rpartition(".")[2] in _ROW_LAYERS
            and not routed
        ):
            if module.bias is not None:
                operations.biases[id(module)] = module.bias.data
            module.bias = None  # type: ignore[assignment]


def _joined_layers(module: nn.Module) -> Iterator[Sequence[EmptyLinear]]:
    if isinstance(module, GroupedQueryAttention):
        yield (module.q, module.k, module.v)
    if isinstance(module, MLP) and module.shape.gated:
        yield (module.gate, module.up)


def _join(
    linears: Sequence[EmptyLinear], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the parameters of layers views of one tensor, and of another for biases."""
    widths = [one.out_features for one in linears]
    weight = like.new_zeros(sum(widths), linears[0].in_features)
    for one, part in zip(linears, weight.split(widths), strict=True):
        one.weight = _frozen(part)
    if linears[0].bias is None:
        return weight, None
    bias = like.new_zeros(sum(widths))
    for one, part in zip(linears, bias.split(widths), strict=True):
        one.bias = _frozen(part)
    return weight, bias


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
