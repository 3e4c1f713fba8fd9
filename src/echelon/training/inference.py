# SPDX-License-Identifier: Apache-2.0
"""The ranks that generate: each reads its part of a checkpoint, and writes after its prompts.

A checkpoint holds whole tensors by name, so ranks of any layout read their rectangles from it. They
take the parameters (the master copies, in their dtype) and the biases of routers; the state of the
optimizer is not loaded, though the checksums of the files that it shares with them are compared.

Layers that read the same input lie one below the other in one tensor, so that one product makes all
of their outputs: with one token at a time the number of products is what takes time. Names and
shapes of parameters are those of training; whoever reads a checkpoint fills their rectangles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.config.generation import Request
from echelon.core.event import EventList
from echelon.core.parameters import router_bias_name, router_biases
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.core.serialize import from_json
from echelon.cost.bytes.generate import KindCacheSizes, kind_cache_sizes
from echelon.inference.cache import CachedSequence, KindCaches
from echelon.inference.generator import Generator, Writing
from echelon.inference.operations import CacheOperations
from echelon.launch.context import RankContext
from echelon.layout.stage import RankPart, held_experts, held_parameters, part_of
from echelon.models.decoder import MLP, Decoder, GroupedQueryAttention
from echelon.models.modules import EmptyLinear, TensorShare
from echelon.models.precision import TORCH_DTYPES, at_least_fp32
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.fp8_linear import multiply_in_fp8
from echelon.parallel.storage.weights import Shard, tensor_rank_rectangle
from echelon.parallel.transport.recorder import Recorder, clock_of
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.steps.expert_balance import ROUTER_BIAS, whole_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateTask:
    """Say what the ranks of a generation do."""

    plan: Plan
    """How they split the model (`config/generation.py`)."""
    trained: Plan
    """The plan that wrote the checkpoint."""
    checkpoint: str
    """The folder of the checkpoint."""
    tokenizer_hash: str
    """The tokenizer that it was trained with."""
    prompts: tuple[tuple[int, ...], ...]
    """The tokens of each prompt."""
    request: Request
    """What is written after them."""
    end: int
    """The token that ends a text."""
    separator: int | None = None
    """The token that ends a document inside of a prompt, where attention stays inside of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWriting:
    """Say what all ranks wrote, and what this one held and sent for it."""

    written: tuple[tuple[int, ...], ...]
    """The tokens after each prompt, of all replicas."""
    ended: tuple[bool, ...]
    """Whether each text came to its end, rather than to the most tokens."""
    stopped: bool
    """Whether someone asked to stop before."""
    cache_bytes: int
    """Bytes of the cache of this rank."""
    bytes_sent: Mapping[str, int]
    """Bytes that this rank sent while it wrote, by axis."""
    seconds_s: float
    """How long it wrote, from the first prompt on; loading is not in it."""


def replica_prompts(plan: Plan, replica: int, prompts: Sequence[Any]) -> range:
    """Return the numbers of the prompts of one replica: those are dealt out in turn."""
    return range(replica, len(prompts), plan.mesh.dp_replicate)


def rank_cache_size(
    plan: Plan, rank: int, request: Request, lengths: Sequence[int]
) -> KindCacheSizes:
    """Return the cache that a rank makes for prompts of so many tokens, of all replicas."""
    part = part_of(plan, rank)
    replica = rank // plan.mesh.tp % plan.mesh.dp_replicate
    return kind_cache_sizes(
        plan,
        part.blocks,
        [lengths[number] for number in replica_prompts(plan, replica, lengths)],
        max_tokens=request.max_tokens,
        block_tokens=request.block_tokens,
    )


def generate_rank(context: RankContext, argument: Mapping[str, Any]) -> RankWriting:
    """Write after the prompts of this rank's replica; the target of every rank."""
    task = from_json(GenerateTask, argument, where="task")
    plan, request, device = task.plan, task.request, context.device
    events = EventList()
    recorder = Recorder(context.rank, events, context.progress, clock_of(device))
    groups = rank_groups(plan, recorder)
    part = part_of(plan, context.rank)
    recorder.mark(f"reading {task.checkpoint}")
    decoder = load_part(task, part, groups, device, context.pieces)
    operations = decoder.operations
    assert isinstance(operations, CacheOperations)
    size = rank_cache_size(plan, context.rank, request, [len(one) for one in task.prompts])
    dtype = TORCH_DTYPES[plan.mathematics.precision.master]
    operations.caches = KindCaches(size, dtype, device)
    operations.length = task.trained.mathematics.sequence_length
    sequences = [
        CachedSequence(
            number=number,
            tokens=list(task.prompts[number]),
            prompt_tokens=len(task.prompts[number]),
            separator=task.separator,
        )
        for number in replica_prompts(plan, groups.data.index, task.prompts)
    ]
    writing = Writing(max_tokens=request.max_tokens, sampling=request.sampling, end=task.end)
    generator = Generator(plan, decoder, groups, stop_requested=context.stop_requested)
    events.events.clear()
    context.progress.answer_stop()
    start = time.perf_counter()
    stopped = generator.write(sequences, writing)
    recorder.settle()
    seconds_s, sent = time.perf_counter() - start, dict(events.bytes_by_axis())
    told = {one.number: (tuple(one.written), one.ended, stopped) for one in sequences}
    everything: dict[int, tuple[tuple[int, ...], bool, bool]] = {}
    for one in groups.world.gather_objects(told):
        everything |= one
    return RankWriting(
        written=tuple(everything[number][0] for number in range(len(task.prompts))),
        ended=tuple(everything[number][1] for number in range(len(task.prompts))),
        stopped=any(one[2] for one in everything.values()),
        cache_bytes=operations.caches.num_bytes,
        bytes_sent=sent,
        seconds_s=seconds_s,
    )


def load_part(
    task: GenerateTask,
    part: RankPart,
    groups: RankGroups,
    device: torch.device,
    pieces: PieceSizes = TRAINING_PIECES,
) -> Decoder:
    """Return a rank's part of the model with the weights of the checkpoint.

    Where linear layers were trained to multiply 8-bit numbers, they do.
    """
    plan, precision = task.plan, task.plan.mathematics.precision
    decoder = empty_decoder(plan, part, groups, TORCH_DTYPES[precision.master], device, pieces)
    wide = at_least_fp32(TORCH_DTYPES[precision.parameters])
    biases = {
        spec.layer: torch.zeros(spec.shape, dtype=wide, device=device)
        for spec in router_biases(plan.model)
        if spec.layer is not None and spec.layer in part.blocks
    }
    load_checkpoint(
        Path(task.checkpoint),
        wanted={
            PARAMETERS: weight_shards(plan, part, decoder, groups),
            ROUTER_BIAS: whole_shards(
                {router_bias_name(layer): bias for layer, bias in biases.items()}
            ),
        },
        identity=RunIdentity.from_plan(task.trained, task.tokenizer_hash),
        exchange=groups.world,
        pieces=pieces,
    )
    merge_adapters(decoder)
    put_off_biases(decoder)
    if precision.is_fp8:
        multiply_in_fp8(decoder, precision.fp8_block)
    operations = decoder.operations
    assert isinstance(operations, CacheOperations)
    operations.balance, operations.router_biases = plan.mathematics.balance, biases
    return decoder


_ROW_LAYERS = ("o", "down")
"""The names of layers whose outputs ranks sum: their bias is added once, afterwards."""


def empty_decoder(
    plan: Plan,
    part: RankPart,
    groups: RankGroups,
    dtype: torch.dtype,
    device: torch.device,
    pieces: PieceSizes = TRAINING_PIECES,
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
        pieces=pieces,
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
