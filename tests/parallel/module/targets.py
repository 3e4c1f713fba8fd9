"""A loop over any module as a user writes it, for ranks to run; and the same on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.event import Event, EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.modules import ModuleBuckets
from echelon.parallel.module.module import UnitSummary
from echelon.parallel.offload.store import storage_bytes
from echelon.training.module.optimizer import ModuleOptimizer, ModuleStep
from tests.parallel.module.models import Block, loss_of, make, tokens

Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training loop; `skips` names the blocks that a rank leaves out, by (step, rank)."""

    plan: Plan
    model: str = "transformer"
    units: Any = "blocks"
    steps: int = 3
    microbatches: int = 1
    no_sync: bool = True
    unused: Literal["error", "zero"] = "error"
    gradients: Literal["mean", "sum"] = "mean"
    learning_rate: Literal["plan", "own"] = "plan"
    scheduled: bool = False
    skips: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    evaluates: bool = False
    idle: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Looped:
    """What a rank saw."""

    reports: list[ModuleStep]
    after: Values
    events: list[list[Event]]
    streamed: list[str]
    most_whole: int
    losses: list[float]


def train(context: RankContext, loop: Loop) -> Looped:
    """Run a loop on this rank."""
    model = make(loop.model)
    if context.rank > 0:  # every rank starts with the values of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(context.rank)
    events = EventList()
    same = model
    identities = [id(one) for one in model.parameters()]
    model, optimizer = parallelize(
        model,
        loop.plan,
        units=loop.units,
        unused=loop.unused,
        gradients=loop.gradients,
        learning_rate=loop.learning_rate,
        events=events,
    )
    assert model is same
    assert [id(one) for one in model.parameters()] == identities
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if loop.scheduled else None
    most = _Most(optimizer, model)
    reports: list[ModuleStep] = []
    stepped: list[list[Event]] = []
    losses: list[float] = []
    for step in range(loop.steps):
        events.events.clear()
        optimizer.zero_grad()
        most.most = 0
        _backwards(loop, optimizer, model, step, context.rank, losses)
        reports.append(optimizer.step())
        stepped.append(list(events.events))
        if scheduler is not None:
            scheduler.step()
    after = full(optimizer)
    optimizer.close()
    return Looped(
        reports=reports,
        after=after,
        events=stepped,
        streamed=[row.name for row in optimizer.units() if row.streamed],
        most_whole=most.most,
        losses=losses,
    )


def _backwards(
    loop: Loop,
    optimizer: ModuleOptimizer,
    model: nn.Module,
    step: int,
    rank: int,
    losses: list[float],
) -> None:
    skip = loop.skips.get((step, rank), ())
    if (step, rank) in loop.idle:
        return
    for microbatch in range(loop.microbatches):
        last = microbatch == loop.microbatches - 1
        waits = contextlib.nullcontext() if last or not loop.no_sync else optimizer.no_sync()
        if loop.evaluates:
            with torch.no_grad():
                losses.append(float(loss_of(model, tokens(step, microbatch, rank))))
        with waits:
            loss = loss_of(model, tokens(step, microbatch, rank), skip) / loop.microbatches
            losses.append(float(loss.detach()))
            optimizer.scale(loss).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class _Most:
    """Count how many streamed buckets are whole at once, as each unit begins or ends."""

    def __init__(self, optimizer: ModuleOptimizer, model: nn.Module) -> None:
        self.most, self._residency = 0, optimizer.module.gathering
        for module in model.modules():
            module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._look()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._look)

    def _look(self, *_: Any) -> None:
        kept = {bucket.name for bucket in self._residency.kept}
        sliced = [one for one in self._residency.sliced if one.name not in kept]
        whole = [one for one in sliced if one.values_memory.present]
        self.most = max(self.most, len(whole))


def full(optimizer: ModuleOptimizer, kind: str = "parameters") -> Values:
    """Return whole tensors of one kind (on rank 0; nothing on the others)."""
    found: Values = {}

    def take(of: str, name: str, tensor: torch.Tensor) -> None:
        if of == kind:
            assert name not in found
            found[name] = tensor

    optimizer.full_state(take)
    return found


def one_device(loop: Loop, world_size: int) -> list[tuple[Values, float]]:
    """Return parameters after each step, and the norm of its gradient, on one device."""
    model, settings = make(loop.model), loop.plan.mathematics.optimizer
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p], "weight_decay": settings.weight_decay if p.dim() > 1 else 0.0}
        for p in trained.values()
    ]
    optimizer: torch.optim.Optimizer
    if settings.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )
    steps: list[tuple[Values, float]] = []
    factor = 1.0 if loop.gradients == "sum" else 1.0 / world_size
    for step in range(loop.steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            if (step, rank) in loop.idle:
                continue
            for microbatch in range(loop.microbatches):
                skip = loop.skips.get((step, rank), ())
                loss = loss_of(model, tokens(step, microbatch, rank), skip)
                (loss * factor / loop.microbatches).backward()
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        clip = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)
        exact = float(norm)
        if clip < exact:  # torch adds 1e-6 to the norm
            for parameter in trained.values():
                assert parameter.grad is not None
                parameter.grad.mul_((exact + 1e-6) / exact)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(loop, step)
        optimizer.step()
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
        steps.append((values, exact))
    return steps


def rate_of(loop: Loop, step: int) -> float:
    """Return the learning rate of a step of a loop."""
    from echelon.training.optimizer.step import learning_rate

    settings = loop.plan.mathematics.optimizer
    if loop.learning_rate == "plan":
        return learning_rate(settings, step)
    return settings.learning_rate * (0.5**step if loop.scheduled else 1.0)


def sent_and_planned(
    context: RankContext, loop: Loop
) -> tuple[dict[str, int], ModuleBuckets, list[str]]:
    """Return what the last step sent by axis, the buckets, and those that were kept whole."""
    model, events = make(loop.model), EventList()
    model, optimizer = parallelize(model, loop.plan, units=loop.units, events=events)
    for step in range(2):
        events.events.clear()
        _backwards(loop, optimizer, model, step, context.rank, [])
        optimizer.step()
    sent = events.bytes_by_axis()
    sent.pop("world")
    kept = [bucket.name for bucket in optimizer.module.gathering.kept]
    return sent, optimizer.module.plans, kept


def two_forwards(context: RankContext, plan: Plan) -> tuple[Values, Values]:
    """Return parameters after steps with one backward of two forwards, and with two of one each."""
    found: list[Values] = []
    for joined in (True, False):
        model, optimizer = parallelize(make("transformer"), plan)
        for step in range(3):
            losses = [loss_of(model, tokens(step, m, context.rank)) for m in range(2)]
            if joined:
                (losses[0] + losses[1]).backward()
            else:
                with optimizer.no_sync():
                    losses[1].backward()
                losses[0].backward()
            optimizer.step()
        found.append(full(optimizer))
    return found[0], found[1]


def tables(context: RankContext, plan: Plan) -> list[tuple[UnitSummary, ...]]:
    """Return the units of several choices."""
    choices: list[Any] = ["blocks", Block, 400, ["blocks.2", "blocks.0.mlp"]]
    return [parallelize(make("transformer"), plan, units=choice)[1].units() for choice in choices]


def train_in_low_precision(context: RankContext, loop: Loop) -> tuple[Values, Values, Values]:
    """Return parameters and master copies after training, and the copies of the start."""
    model, optimizer = parallelize(make(loop.model).float(), loop.plan)
    at_start = full(optimizer, "master")
    for step in range(loop.steps):
        _backwards(loop, optimizer, model, step, context.rank, [])
        optimizer.step()
    return full(optimizer), full(optimizer, "master"), at_start


def held(context: RankContext, plan: Plan) -> tuple[dict[str, int], ModuleBuckets]:
    """Return the bytes of live storages after two steps, and the buckets."""
    model, optimizer = parallelize(make("transformer"), plan)
    for step in range(2):
        loss_of(model, tokens(step, 0, context.rank)).backward()
        optimizer.step()
    buckets = [*optimizer.module.buckets, *optimizer.module.frozen]
    split = {slot.spec.name for bucket in buckets for slot in bucket.slots}
    others = [one for name, one in model.named_parameters() if name not in split]
    values = [one for bucket in buckets for one in (bucket.values, bucket.value_slice)]
    gradients = [one for bucket in buckets for one in (bucket.gradients, bucket.gradient_slice)]
    slices = optimizer.state_dict()["tensors"]
    return {
        "parameters": storage_bytes([*values, *others]),
        "gradients": storage_bytes(gradients),
        "state": sum(
            one.nbytes for kind in ("exp_avg", "exp_avg_sq") for one in slices[kind].values()
        ),
    }, optimizer.module.plans
