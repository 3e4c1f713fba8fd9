"""Context parallelism with torch alone over the Hugging Face Llama, split contiguously.

Variants: "ulysses" and "ring" are written by hand (`plain_context.py`); "experimental" is torch's
own `context_parallel`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.harness.data import global_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join, llama
from bench.peers.plain_context import ring, ulysses

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q, k, v [B, H, T, D] of one rank; the shape of q."""


def attend_by(model: Any, attention: Attention) -> None:
    """Let a Hugging Face model attend by a function."""
    from transformers import AttentionInterface

    def attend(
        _: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any
    ) -> tuple[torch.Tensor, None]:
        return attention(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("bench", attend)
    model.config._attn_implementation = "bench"


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients over the ranks, in one flat all-reduce."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    rank, world = join(settings)
    model = llama(settings)
    if settings.variant == "experimental":
        return _torch_context_parallel(settings, model, world)
    attend_by(model, {"ulysses": ulysses, "ring": ring}[settings.variant])
    return step_of(settings, model, rank, world)


def step_of(settings: Settings, model: Any, rank: int, world: int) -> StepFunction:
    """Return the step of a rank that holds the `rank`-th of `world` parts of every sequence."""
    optimizer = adamw(settings, model.parameters())
    length = settings.size.sequence // world
    mine = slice(rank * length, (rank + 1) * length)
    positions = torch.arange(settings.size.sequence).unsqueeze(0)[:, mine]

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = (x[:, mine] for x in global_batch(settings, number))
        loss = cross_entropy(model(input_ids=inputs, position_ids=positions).logits, labels)
        loss.backward()
        average_gradients(model.parameters())
        optimizer.step()
        return loss.item()

    return step


def _torch_context_parallel(settings: Settings, model: Any, world: int) -> StepFunction:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    optimizer = adamw(settings, model.parameters())

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = global_batch(settings, number)
        buffers = [inputs, labels, torch.arange(settings.size.sequence).unsqueeze(0)]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            logits = model(input_ids=inputs, position_ids=buffers[2]).logits
            loss = cross_entropy(logits, labels)
            loss.backward()
        average_gradients(model.parameters())
        optimizer.step()
        return loss.item()

    return step
