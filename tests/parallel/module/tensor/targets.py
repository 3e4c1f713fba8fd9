"""Loops over a module on tensor ranks, and the same on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.modules import ModuleBuckets, ModuleSplit
from echelon.parallel.module.tensor import layers
from echelon.training.optimizer.step import learning_rate
from tests.parallel.module.targets import full
from tests.parallel.module.tensor.families import RULES, batch, loss_of, make
from tests.parallel.targets import tensor_group

Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of a few steps; `tensor` says by which rules."""

    plan: Plan
    model: str
    tensor: Any = "auto"
    guess: Any = "prove"
    steps: int = 2
    microbatches: int = 1

    @property
    def rules(self) -> Any:
        """Return the rules, those of our own model where nothing else is said."""
        return RULES.get(self.model, "auto") if self.tensor == "auto" else self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Looped:
    """What a rank saw."""

    losses: list[float]
    norms: list[float]
    after: Values
    moments: Values
    tensor_bytes: list[int]
    split: ModuleSplit
    buckets: ModuleBuckets
    data_rank: int
    chosen: list[torch.Tensor]


def train(context: RankContext, loop: Loop) -> Looped:
    """Run a loop on this rank; each starts with a seed of its own, and rank 0's values count."""
    events = EventList()
    model, optimizer = parallelize(
        make(loop.model, seed=5 + context.rank),
        loop.plan,
        tensor=loop.rules,
        guess=loop.guess,
        example=(batch(0, 0),) if loop.model in RULES else (),
        events=events,
    )
    chosen = watched_choices(model)
    losses: list[float] = []
    norms: list[float] = []
    sent: list[int] = []
    for step in range(loop.steps):
        events.events.clear()
        chosen.clear()
        for microbatch in range(loop.microbatches):
            ids = batch(10 * step + microbatch, optimizer.data_rank)
            loss = loss_of(model, ids) / loop.microbatches
            losses.append(float(loss.detach()))
            if microbatch < loop.microbatches - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(optimizer.step().grad_norm)
        sent.append(sum(one.bytes for one in events.events if one.axis == "tp"))
    return Looped(
        losses=losses,
        norms=norms,
        after=full(optimizer),
        moments=full(optimizer, "exp_avg"),
        tensor_bytes=sent,
        split=optimizer.module.split,
        buckets=optimizer.module.plans,
        data_rank=optimizer.data_rank,
        chosen=chosen,
    )


def watched_choices(model: nn.Module) -> list[torch.Tensor]:
    """Return a list to which each call of stacks of experts adds what tokens chose, [N, K]."""
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts") and list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
    return chosen


def one_device(
    loop: Loop, data_ranks: int
) -> tuple[list[list[float]], list[float], Values, Values]:
    """Return losses by data rank, norms, parameters and first moments after the last step."""
    model, settings = make(loop.model), loop.plan.mathematics.optimizer
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": settings.weight_decay if p.dim() > 1 else 0.0}
            for p in named.values()
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses: list[list[float]] = [[] for _ in range(data_ranks)]
    norms: list[float] = []
    for step in range(loop.steps):
        optimizer.zero_grad()
        for rank in range(data_ranks):
            for microbatch in range(loop.microbatches):
                loss = loss_of(model, batch(10 * step + microbatch, rank)) / loop.microbatches
                losses[rank].append(float(loss.detach()))
                (loss / data_ranks).backward()
        gradients = [one.grad for one in named.values() if one.grad is not None]
        norms.append(float(torch.stack([one.square().sum() for one in gradients]).sum().sqrt()))
        for one in gradients:
            one.mul_(min(1.0, (settings.clip_norm or 1e9) / norms[-1]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
    moments = {name: optimizer.state[one]["exp_avg"] for name, one in named.items()}
    return losses, norms, {n: p.detach() for n, p in named.items()}, moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one rank gave and got, and the gradient that went back."""

    x: torch.Tensor
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor
    contiguous: bool


def move_each(context: RankContext, dims: Sequence[int]) -> dict[tuple[str, int], Moved]:
    """Move rows [2, 4, 6] of this rank along each of `dims` in every way that cuts or joins."""
    group, _ = tensor_group(context)
    ways = {"gather": layers.GATHER_ROWS, "scatter": layers.SCATTER_ROWS}
    ways |= {"own": layers.OWN_ROWS, "whole": layers.WHOLE_ROWS}
    generator = torch.Generator().manual_seed(group.index)
    found: dict[tuple[str, int], Moved] = {}
    for name, way in ways.items():
        for dim in dims:
            x = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
            y = layers.move_along(x, dim, group, name, way)
            dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
            (dx,) = torch.autograd.grad(y, x, dy)
            found[name, dim] = Moved(
                x=x.detach(), y=y.detach(), dy=dy, dx=dx, contiguous=y.is_contiguous()
            )
    return found
