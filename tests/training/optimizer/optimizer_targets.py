"""Updates of made-up gradients, on ranks with the engine's buckets and on one device.

One device: torch's own AdamW and SGD, and Muon in a few lines of plain PyTorch, one parameter at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.event import EventList
from echelon.core.parameters import parameters
from echelon.core.plan import Optimizer, Plan
from echelon.launch.context import RankContext
from echelon.layout.stage import decays, update_rule_of
from echelon.models.counter_random import make_key
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import bucket_shards
from echelon.parallel.transport.recorder import Recorder
from echelon.training.optimizer import MASTER, SliceOptimizer
from tests.parallel.one_device import Values, normal_rectangle, place
from tests.parallel.targets import Shards, copies

RATES = (0.1, 0.05, 0.2)
FACTORS = (1.0, 0.3, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What one rank holds after the updates, and what it did.

    `padding` says whether the padding of values and master copies is still zero, `sent` how many
    bytes each update sent to other ranks of the stage.
    """

    values: Shards
    state: Mapping[str, Shards]
    order: list[str]
    sent: list[int]
    held: int
    padding: bool


def update(context: RankContext, argument: tuple[Plan, str]) -> Updated:
    """Update this rank's slices by the gradients of `gradients`; files are in a given folder."""
    plan, folder = argument
    events = EventList()
    groups = rank_groups(plan, Recorder(context.rank, events))
    model = apply_plan(plan, groups, context.device)
    zero = replace(plan.layout.zero, offload_dir=folder, offload_buffers=2)
    placed = replace(plan, layout=replace(plan.layout, zero=zero))
    optimizer = SliceOptimizer(model.buckets, placed, groups=groups, device=context.device)
    start_masters(optimizer, model.buckets)
    order: list[str] = []
    sent: list[int] = []
    for step, (rate, factor) in enumerate(zip(RATES, FACTORS, strict=True)):
        put_gradients(model.buckets, groups, gradients(plan, step))
        before = events.bytes_by_axis().get("stage", 0)
        optimizer.update(rate, factor, lambda bucket: order.append(bucket.name))
        sent.append(events.bytes_by_axis().get("stage", 0) - before)
    if model.parameter_store is not None:
        model.parameter_store.flush()
    updated = Updated(
        values=slices(model.buckets, {b.name: b.value_slice for b in model.buckets}, groups),
        state={
            kind: slices(model.buckets, flats, groups) for kind, flats in optimizer.state().items()
        },
        order=order,
        sent=sent,
        held=optimizer.store.held_bytes(),
        padding=all(
            not flats[bucket.name][padding(bucket)].any()
            for flats in ({b.name: b.value_slice for b in model.buckets}, *masters(optimizer))
            for bucket in model.buckets
        ),
    )
    optimizer.store.close()
    return updated


def start_masters(optimizer: SliceOptimizer, buckets: Sequence[Bucket]) -> None:
    """Fill the master copies, where there are any, from the parameters."""
    for flats in masters(optimizer):
        for bucket in buckets:
            flats[bucket.name].copy_(bucket.value_slice)


def masters(optimizer: SliceOptimizer) -> list[dict[str, torch.Tensor]]:
    """Return the master copies, where there are any."""
    return [flats for kind, flats in optimizer.state().items() if kind == MASTER]


def padding(bucket: Bucket) -> slice:
    """Return where in this rank's slice the padding at the end of a bucket is."""
    return bucket.within_own_slice(slice(bucket.slots[-1].end, bucket.plan.num_elements))


def slices(buckets: list[Bucket], flats: Mapping[str, torch.Tensor], groups: RankGroups) -> Shards:
    """Return copies of what flat slices hold, by canonical name."""
    held = [bucket for bucket in buckets if bucket.name in flats]
    return copies(bucket_shards(held, [flats[bucket.name] for bucket in held], groups))


def put_gradients(buckets: list[Bucket], groups: RankGroups, values: Values) -> None:
    """Write whole gradients into the slices; what is padding is not a number."""
    for bucket in buckets:
        bucket.gradient_slice.zero_()
        bucket.gradient_slice[padding(bucket)] = float("nan")
    flats = [bucket.gradient_slice for bucket in buckets]
    for name, shards in bucket_shards(buckets, flats, groups).items():
        for shard in shards:
            shard.tensor.copy_(values[name][place(shard)])


def gradients(plan: Plan, step: int) -> Values:
    """Return made-up whole gradients of a step."""
    return {
        spec.name: normal_rectangle(
            make_key("gradient", str(step), spec.name),
            spec.shape,
            (0,) * len(spec.shape),
            spec.shape,
        )
        for spec in parameters(plan.model)
    }


def on_one_device(
    plan: Plan,
    start: Values,
    dtype: torch.dtype = torch.float64,
    rounded: torch.dtype | None = None,
) -> Values:
    """Return the parameters after the same updates of whole tensors in `dtype`.

    Gradients are `rounded` first, where a dtype is given.
    """
    settings = plan.mathematics.optimizer
    after: Values = {}
    for spec in parameters(plan.model):
        one = torch.nn.Parameter(start[spec.name].to(dtype))
        decay = settings.weight_decay if decays(settings, spec) else 0.0
        rule = update_rule_of(settings, spec)
        optimizer = None if rule == "muon" else torch_optimizer(rule, one, settings, decay)
        momentum = torch.zeros_like(one)
        for step, (rate, factor) in enumerate(zip(RATES, FACTORS, strict=True)):
            one.grad = gradients(plan, step)[spec.name].to(rounded or dtype).to(dtype) * factor
            if optimizer is None:
                muon(one, momentum, settings, rate, decay)
                continue
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        after[spec.name] = one.detach()
    return after


def torch_optimizer(
    rule: str, one: torch.nn.Parameter, settings: Optimizer, decay: float
) -> torch.optim.Optimizer:
    """Return torch's optimizer of one parameter."""
    if rule == "sgd":
        return torch.optim.SGD([one], momentum=settings.momentum, weight_decay=decay)
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW([one], betas=betas, eps=settings.eps, weight_decay=decay)


@torch.no_grad()
def muon(
    one: torch.nn.Parameter,
    momentum: torch.Tensor,
    settings: Optimizer,
    rate: float,
    decay: float,
) -> None:
    """Update a matrix as Jordan et al. do, scaled as Liu et al. do."""
    assert one.grad is not None
    momentum.mul_(settings.momentum).add_(one.grad)
    x = one.grad + settings.momentum * momentum
    rows, columns = x.shape
    x = x / (x.square().sum().sqrt() + 1e-7)
    x = x.t() if rows > columns else x
    for _ in range(settings.newton_schulz_steps):
        a = x @ x.t()
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    x = x.t() if rows > columns else x
    one.mul_(1 - rate * decay).sub_(rate * 0.2 * max(rows, columns) ** 0.5 * x)
