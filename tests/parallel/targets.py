"""What ranks run in these tests. Arguments hold a Plan; results hold tensors and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.core.event import Event, EventList
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.storage.weights import Shard, bucket_shards
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.steps.part import StepResult
from echelon.training.subject import held_bytes, rank_batches
from tests.parallel.layouts import plan_of
from tests.parallel.one_device import make_rows, place, random_values

Shards = Mapping[str, list[Shard]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One rank's part of a plan, with random values."""

    groups: RankGroups
    model: RankModel
    events: EventList

    def gradients(self) -> Shards:
        """Return copies of the gradients in the buckets."""
        flats = [bucket.gradient_slice for bucket in self.model.buckets]
        return copies(bucket_shards(self.model.buckets, flats, self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one rank computed: an output, the gradient of the input, of the weights, and events."""

    out: torch.Tensor
    dx: torch.Tensor
    gradients: Shards
    events: list[Event]
    saved: list[tuple[int, ...]]


def copies(shards: Shards) -> dict[str, list[Shard]]:
    """Return shards that no longer look into the buckets."""
    return {
        name: [replace(shard, tensor=shard.tensor.clone()) for shard in held]
        for name, held in shards.items()
    }


def tensor_group(context: RankContext) -> tuple[Group, EventList]:
    """Return the group of all ranks as tensor ranks, and what it records."""
    events = EventList()
    plan = plan_of(tp=context.world_size)
    return rank_groups(plan, Recorder(context.rank, events)).tensor, events


def build(context: RankContext, plan: Plan, pieces: PieceSizes = TRAINING_PIECES) -> Built:
    """Return this rank's part of `plan` with random values in place of the first ones."""
    events = EventList()
    groups = rank_groups(plan, Recorder(context.rank, events))
    model = apply_plan(plan, groups, context.device, pieces=pieces)
    values = random_values(plan)
    held = bucket_shards(model.buckets, [bucket.values for bucket in model.buckets], groups)
    for name, shards in held.items():
        for shard in shards:
            shard.tensor.copy_(values[name][place(shard)])
    model.store.start_step()
    model.store.start_backward(last=True)
    return Built(groups=groups, model=model, events=events)


def every_collective(context: RankContext, argument: Any) -> dict[str, Any]:
    """Run each collective once on values that tell the ranks apart."""
    group, events = tensor_group(context)
    n, rank = context.world_size, context.rank
    whole = torch.arange(4 * n, dtype=torch.float64).view(2 * n, 2) * (rank + 1)
    summed = whole.clone()
    group.all_reduce(summed, name="sum").wait()
    gathered = torch.empty(2 * n, 2, dtype=torch.float64)
    group.all_gather(gathered, whole[:2].clone(), name="gather").wait()
    piece = torch.empty(2, 2, dtype=torch.float64)
    kept = whole.clone()
    pending = group.reduce_scatter(piece, kept, name="scatter", async_op=True)
    pending.wait()
    pending.wait()
    exchanged = torch.empty_like(whole)
    group.all_to_all(exchanged, whole, name="exchange").wait()
    rows = group.gather_rows(torch.tensor([rank, 10 * rank]), name="rows")
    objects = group.gather_objects({"rank": rank})
    arrived = torch.empty(3, dtype=torch.float64)
    receive = group.receive(arrived, (rank - 1) % n, name="receive", tag=5)
    sent = torch.full((3,), float(rank), dtype=torch.float64)
    send = group.send(sent, (rank + 1) % n, name="pass", tag=5)
    receive.wait()
    send.wait()
    return {
        "whole": whole,
        "summed": summed,
        "gathered": gathered,
        "piece": piece,
        "kept": kept,
        "exchanged": exchanged,
        "rows": rows,
        "objects": objects,
        "arrived": arrived,
        "done": receive.done() and send.done(),
        "events": events.events,
    }


def strided_tensors(context: RankContext, argument: Any) -> list[str]:
    """Offer a strided tensor to each collective; return the refusals."""
    group, _ = tensor_group(context)
    strided, flat = torch.ones(4, 4).t()[:2], torch.ones(2, 4)
    assert not strided.is_contiguous()
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(strided, name="reduce"),
        lambda: group.all_gather(torch.ones(4, 4).t(), flat, name="gather"),
        lambda: group.all_gather(torch.ones(4, 4), strided, name="gather piece"),
        lambda: group.reduce_scatter(strided, torch.ones(4, 4), name="scatter piece"),
        lambda: group.reduce_scatter(flat, torch.ones(4, 4).t(), name="scatter"),
        lambda: group.all_to_all(strided, flat, name="exchange received"),
        lambda: group.all_to_all(flat, strided, name="exchange sent"),
        lambda: group.send(strided, 1 - context.rank, name="send", tag=0),
        lambda: group.receive(strided, 1 - context.rank, name="receive", tag=0),
    ]
    refusals: list[str] = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            refusals.append(str(error))
    return refusals


def run_and_record(
    built: Built, compute: Callable[[], tuple[torch.Tensor, torch.Tensor]], dy: torch.Tensor | None
) -> Pass:
    """Run `compute` (which gives output and input) and its backward; note what was kept."""
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, x = compute()
    out.backward(dy)
    built.model.store.run_deferred()
    for bucket in built.model.buckets:
        if bucket.missing:  # a part of the model fills a bucket in part
            built.model.reduction.bucket_is_full(bucket, last=True)
    built.model.reduction.finish()
    assert x.grad is not None
    return Pass(
        out=out.detach(),
        dx=x.grad,
        gradients=built.gradients(),
        events=built.events.events,
        saved=saved,
    )


def own_rows(plan: Plan, groups: RankGroups, x_ND: torch.Tensor) -> torch.Tensor:
    """Return the rows of the stream that this rank holds."""
    if not plan.layout.sequence_parallel:
        return x_ND.clone()
    return x_ND.chunk(plan.mesh.tp)[groups.tensor.index].clone()


def one_block(context: RankContext, argument: tuple[Plan, Any, Any, TokenBatch]) -> Pass:
    """Run the first block as the plan's recompute policy says."""
    plan, x_ND, dy_ND, batch = argument
    built = build(context, plan)
    x_ND = own_rows(plan, built.groups, x_ND).requires_grad_()
    stage = next(iter(built.model.stages.values()))
    block = stage.layers["0"]
    assert isinstance(block, Block)
    return run_and_record(
        built,
        lambda: (stage.run_block(block, x_ND, batch), x_ND),
        own_rows(plan, built.groups, dy_ND),
    )


def embed(context: RankContext, argument: tuple[Plan, Any, TokenBatch]) -> Pass:
    """Embed the tokens; the gradient of the output is given."""
    plan, dy_ND, batch = argument
    built = build(context, plan)
    stage = next(iter(built.model.stages.values()))
    anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
    positions = stage.positions.weight if plan.model.positions == "learned" else None

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        out = stage.operations.embed(stage.embedding.weight, positions, batch)
        return out + anchor, anchor

    return run_and_record(built, compute, own_rows(plan, built.groups, dy_ND))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank did in some steps: losses, norms, gradients of each step, parameters, events.

    `held` are the bytes of model state by term, `most_whole` and `most_gradients` how many sliced
    buckets had their whole parameters and gradients at once; `tail` are the events of what the last
    step left under way; `in_flight` the most microbatches
    whose activations this rank held at once; `order` what became ready, was launched,
    posted and run in the last step.
    """

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    gradients: list[Shards]
    parameters: Shards
    events: list[list[Event]]
    tail: list[Event]
    held: dict[str, int]
    most_whole: int
    most_gradients: int
    in_flight: int
    order: list[tuple[str, str]]
    samples: list[tuple[int, ...]]


def own_batches(engine: TrainEngine, step: int) -> list[TokenBatch]:
    """Return the microbatches of a rank, at its positions."""
    plan, runs = engine.plan, engine.runs_for(engine.plan.mathematics.sequence_length)
    return rank_batches(plan, make_rows(plan, step), engine.data_rank, step, runs=runs)


def train(context: RankContext, argument: tuple[Plan, int]) -> Trained:
    """Take steps with the engine on this rank's rows."""
    plan, num_steps = argument
    recorded = EventList()
    engine = TrainEngine(plan, Recorder(context.rank, recorded), context.device)
    order = watch_order(engine)
    peaks = watch_in_flight(engine)
    whole = watch_whole(engine)
    gradients: list[Shards] = []
    engine.on_gradients = lambda: gradients.append(copies(engine.gradients()))
    results: list[StepResult] = []
    samples: list[tuple[int, ...]] = []
    events: list[list[Event]] = []
    for step in range(num_steps):
        start = len(recorded.events)
        order.clear()
        batches = own_batches(engine, step)
        results.append(engine.step(batches, step))
        samples.append(tuple(int(i) for one in batches for i in one.sample_ids_B))
        events.append(recorded.events[start:])
    start = len(recorded.events)
    engine.model.gathering.settle()
    return Trained(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        tokens=[result.tokens for result in results],
        gradients=gradients,
        parameters=copies(engine.parameters()),
        events=events,
        tail=recorded.events[start:],
        held=held_bytes(engine),
        most_whole=max(values for values, _ in whole),
        most_gradients=max(gradients for _, gradients in whole),
        in_flight=max(peaks),
        order=list(order),
        samples=samples,
    )


def watch_order(engine: TrainEngine) -> list[tuple[str, str]]:
    """Return a list of what happens: gradients ready, buckets launched, receives, actions."""
    order: list[tuple[str, str]] = []
    store: Any = engine.model.store
    arrived, reduction = store._gradient_is_there, engine.model.reduction
    on_full = reduction.bucket_is_full

    def note_ready(slot: Any) -> None:
        order.append(("ready", slot.spec.name))
        arrived(slot)

    def note_launch(bucket: Any, *, last: bool) -> None:
        order.append(("launch", bucket.name))
        on_full(bucket, last=last)

    store._gradient_is_there = note_ready
    reduction.bucket_is_full = note_launch
    executor: Any = engine.model.executor
    post, run = executor._post_receive, executor._run_step

    def note_post(state: Any, message: Any, batch: Any) -> None:
        order.append(("post", str(message)))
        post(state, message, batch)

    def note_run(state: Any, step: Any, *rest: Any, **named: Any) -> None:
        order.append(("run", str(step.receive)))
        run(state, step, *rest, **named)

    executor._post_receive, executor._run_step = note_post, note_run
    return order


def watch_whole(engine: TrainEngine) -> list[tuple[int, int]]:
    """Return a list of how many sliced buckets had parameters, gradients in memory at a time."""
    seen: list[tuple[int, int]] = [(0, 0)]
    store: Any = engine.model.store
    residency: Any = engine.model.gathering
    buckets = engine.model.buckets

    def note(*_: Any, **__: Any) -> None:
        values = [
            bucket for bucket in buckets if bucket.plan.sliced and bucket.values_memory.present
        ]
        gradients = [bucket for bucket in buckets if bucket.gradients_memory.present]
        seen.append((len(values), len(gradients)))

    def after(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            note()
            return result

        setattr(owner, name, noted)

    after(store, "_open")
    after(residency, "_gather")
    return seen


def watch_in_flight(engine: TrainEngine) -> list[int]:
    """Return a list of how many microbatches were held after each forward pass."""
    peaks: list[int] = [0]
    executor: Any = engine.model.executor
    forward = executor._forward

    def note(state: Any, *rest: Any) -> Any:
        out = forward(state, *rest)
        peaks.append(len(state.outputs))
        return out

    executor._forward = note
    return peaks
