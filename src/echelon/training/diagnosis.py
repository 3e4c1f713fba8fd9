# SPDX-License-Identifier: Apache-2.0
"""Where a NaN came from: the first module, microbatch and samples that were not finite.

Every rank takes part, in step, after a step whose loss or norm was not finite and before any
weight has changed. The forward pass is run again with a look at what each module gives, and at the
logits of routers. Where all of it is finite, backward is run again, too, with a look at the
gradients of each rank before they are summed: in a sum, whose slices lie anywhere, it is not seen
whose gradient was the first. Weights that are not finite themselves are told with the rank that
holds them.

A router is no module that is called, and a sigmoid makes a finite score of an infinite logit, so
logits are looked at themselves. What is not finite before a router is not its fault.

Shape suffixes: n tokens of this rank, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.errors import RunFailed
from echelon.core.rulebook.run import LOSS_NOT_FINITE
from echelon.models.batch import TokenBatch
from echelon.models.precision import at_least_fp32
from echelon.parallel.data import GradientReduction
from echelon.parallel.expert.router import RoutedTokens, Router, TokenRouting
from echelon.parallel.operations import RankOperations
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.schedule.from_plan import forward_only
from echelon.training.engine import TrainEngine
from echelon.training.steps.part import StepResult

_TEXT_BYTES = 512  # bytes of a message between ranks
_NOTHING = 1 << 30  # a microbatch after all others
_MODULES_PER_STAGE = 1 << 20  # positions


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class NonFiniteFinding:
    """Say what a rank saw first; findings sort by when the pass that found them met them."""

    microbatch: int
    position: int
    rank: int
    text: str


def explain_not_finite(
    engine: TrainEngine, batches: Sequence[TokenBatch], step: int, result: StepResult
) -> RunFailed:
    """Return the error that names where the first value that is not finite came from."""
    finding = _in_forward(engine, batches)
    if finding is None:
        in_sum = _first(engine, _in_sums(engine))
        finding = _in_backward(engine, batches, result) or in_sum
    weight = _first(engine, _in_weights(engine))
    where = "" if finding is None else f"; first seen on {finding.text}"
    where += "" if weight is None else f"; not finite itself is {weight.text}"
    values = f"loss {result.loss}, gradient norm {result.grad_norm}"
    return RunFailed(
        LOSS_NOT_FINITE.problem(
            f"step {step}: {values}{where}; the weights are those of step {step - 1}",
            suggestions=("a lower optimizer.learning_rate", "more optimizer.warmup_steps"),
        )
    )


@torch.no_grad()
def _in_forward(engine: TrainEngine, batches: Sequence[TokenBatch]) -> NonFiniteFinding | None:
    found: list[NonFiniteFinding] = []
    recorder, stages = engine.groups.recorder, engine.model.stages.values()
    modules = [list(_as_they_end(stage)) for stage in stages]
    places = {name: place for stage in modules for place, (name, _) in enumerate(stage)}

    def tell(name: str, what: str = "") -> None:
        if found:
            return
        microbatch = recorder.microbatch or 0
        samples = [int(i) for i in batches[microbatch].sample_ids_B]
        found.append(
            NonFiniteFinding(
                microbatch=microbatch,
                position=(recorder.stage or 0) * _MODULES_PER_STAGE + places[name],
                rank=engine.groups.rank,
                text=f"{_who(engine)}, microbatch {microbatch} (samples {first_few(samples)}), "
                f"in {name or 'the loss'}{what and f': {what}'}",
            )
        )

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            made: tuple[object, ...] = output if isinstance(output, tuple) else (output,)
            if any(isinstance(one, torch.Tensor) and not one.isfinite().all() for one in made):
                tell(name)

        return module.register_forward_hook(look)

    handles = [watch(name, module) for stage in modules for name, module in stage]
    try:
        schedule = forward_only(engine.schedule, len(batches))
        with watching_routers(
            find_routers(stages), lambda layer, what: tell(f"layers.{layer}.mlp.router", what)
        ):
            if engine.computes:
                engine.model.executor.run(schedule, batches, 1.0)
    finally:
        for handle in handles:
            handle.remove()
        engine.model.gathering.end_pass()
    return _first(engine, found[0] if found else None)


def _as_they_end(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in the order in which their forward ends: those inside of one before it."""
    for child, inside in module.named_children():
        yield from _as_they_end(inside, f"{name}.{child}" if name else child)
    yield name, module


def _in_backward(
    engine: TrainEngine, batches: Sequence[TokenBatch], result: StepResult
) -> NonFiniteFinding | None:
    """Take the step again without its update, and look at gradients before they are summed."""
    found: list[NonFiniteFinding] = []
    model = engine.model

    def look(bucket: Bucket) -> None:
        # Where gradients of microbatches add up before they are seen, it may be any of them.
        one_by_one, microbatch = bucket.adds_slices, engine.groups.recorder.microbatch or 0
        place = f", microbatch {microbatch}" if one_by_one else ""
        finding = _in_bucket(engine, bucket, place, lambda slot: slot.gradient)
        if finding is not None and not found:
            found.append(replace(finding, microbatch=microbatch if one_by_one else 0))

    model.store.start_step()
    model.reduction.start_step()
    with _watching_buckets(model.reduction, look):
        scale = result.loss_scale / max(1, result.tokens)
        if engine.computes:
            model.executor.run(engine.schedule, batches, scale)
        model.reduction.finish()
        model.gathering.end_pass()
    return _first(engine, found[0] if found else None)


@contextmanager
def _watching_buckets(
    reduction: GradientReduction, look: Callable[[Bucket], None]
) -> Iterator[None]:
    """Show `look` every bucket that is full, before it is summed."""
    reduce = reduction.bucket_is_full

    def look_and_reduce(bucket: Bucket, *, last: bool) -> None:
        look(bucket)
        reduce(bucket, last=last)

    # An attribute of the object hides the method until it is gone.
    reduction.bucket_is_full = look_and_reduce
    try:
        yield
    finally:
        del reduction.bucket_is_full


def _in_sums(engine: TrainEngine) -> NonFiniteFinding | None:
    """Return what is not finite in the sums that this rank holds."""

    def part(slot: Slot) -> torch.Tensor:
        bucket = slot.bucket
        return bucket.gradient_slice[bucket.within_own_slice(slice(slot.start, slot.end))]

    findings = (
        _in_bucket(engine, bucket, "", part, "sum of the ") for bucket in engine.model.buckets
    )
    return min((finding for finding in findings if finding is not None), default=None)


def _in_bucket(
    engine: TrainEngine,
    bucket: Bucket,
    place: str,
    gradient: Callable[[Slot], torch.Tensor],
    what: str = "",
) -> NonFiniteFinding | None:
    """Return the gradient of a bucket that backward came to first, of those not finite."""
    stages = engine.model.stages
    places = {
        name: stage * _MODULES_PER_STAGE + place
        for stage, module in sorted(stages.items(), reverse=True)
        for place, (name, _) in enumerate(module.named_parameters())
    }
    bad = [slot for slot in bucket.slots if not gradient(slot).isfinite().all()]
    if not bad:
        return None
    # A parameter server runs no stage, and what it sees it sees after all others.
    latest, name = max((places.get(slot.spec.name, 0), slot.spec.name) for slot in bad)
    return NonFiniteFinding(
        microbatch=0,
        position=engine.plan.num_stages * _MODULES_PER_STAGE - latest,
        rank=engine.groups.rank,
        text=f"{_who(engine)}{place}, in the {what}gradient of {name}",
    )


def _in_weights(engine: TrainEngine) -> NonFiniteFinding | None:
    for position, (name, shards) in enumerate(engine.parameters().items()):
        if not all(shard.tensor.isfinite().all() for shard in shards):
            text = f"the weight {name} of {_who(engine)}"
            return NonFiniteFinding(
                microbatch=0, position=position, rank=engine.groups.rank, text=text
            )
    return None


def _first(engine: TrainEngine, mine: NonFiniteFinding | None) -> NonFiniteFinding | None:
    """Return the earliest finding of all ranks, the same on each."""
    finding = mine or NonFiniteFinding(microbatch=_NOTHING, position=0, rank=0, text="")
    device = engine.device
    key = torch.tensor([finding.microbatch, finding.position, finding.rank], device=device)
    text = finding.text.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b" ")
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    keys = engine.groups.world.gather_rows(key, name="finding.place").tolist()
    texts = engine.groups.world.gather_rows(row, name="finding.text").cpu()
    (microbatch, position, rank), index = min((k, i) for i, k in enumerate(keys))
    if microbatch == _NOTHING:
        return None
    told = bytes(texts[index].tolist()).decode("ascii").rstrip()
    return NonFiniteFinding(microbatch=microbatch, position=position, rank=rank, text=told)


def _who(engine: TrainEngine) -> str:
    rank, place = engine.groups.recorder.run_rank, engine.groups.rank
    return f"rank {rank} ({engine.plan.mesh.label(place)})"


ReportRouter = Callable[[int, str], None]
"""Learn in which layer a router gave what is not finite, and for which tokens."""

_MOST_SAMPLES = 3  # samples in a message
_MOST_NUMBERS = 4  # of samples or positions in a message


def find_routers(stages: Iterable[nn.Module]) -> list[Router]:
    """Return the routers of the stages of a rank, each once."""
    operations = (stage.operations for stage in stages)
    found = (o.experts for o in operations if isinstance(o, RankOperations))
    return list({id(one.router): one.router for one in found if one is not None}.values())


def listen_to(router: Router, look: Callable[..., None]) -> None:
    """Show `look` what the router reads (but `train`), and what it returns, from now on."""
    route = router.route

    def listening(*read: Any, **options: Any) -> TokenRouting:
        routed = route(*read, **options)
        look(*read, routed)
        return routed

    router.route = listening


@contextmanager
def watching_routers(routers: Sequence[Router], report: ReportRouter) -> Iterator[None]:
    """Tell `report` of every layer whose router gives what is not finite."""
    before = [router.route for router in routers]

    def look(
        x_nD: torch.Tensor, weight_ED: nn.Parameter, layer: int, tokens: RoutedTokens, _: object
    ) -> None:
        bad_n = _not_finite(x_nD, weight_ED)
        if bool(bad_n.any()):
            report(layer, _describe_tokens(tokens, bad_n))

    for router in routers:
        listen_to(router, look)
    try:
        yield
    finally:
        for router, route in zip(routers, before, strict=True):
            router.route = route


@torch.no_grad()
def _not_finite(x_nD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite, and their logits are not."""
    wide = at_least_fp32(x_nD.dtype)
    logits_nE = fn.linear(x_nD.to(wide), weight_ED.to(wide))
    return x_nD.isfinite().all(-1) & ~logits_nE.isfinite().all(-1)


def _describe_tokens(tokens: RoutedTokens, bad_n: torch.Tensor) -> str:
    """Return how many tokens there are, and the first ones by sample and position."""
    numbers = sorted(tokens.number_n[bad_n].tolist())
    positions: dict[int, list[int]] = {}
    for number in numbers:
        sample, position = divmod(number, tokens.length)
        positions.setdefault(sample, []).append(position)
    samples = [
        f"sample {sample}, position{'s' * (len(at) > 1)} {first_few(at)}"
        for sample, at in list(positions.items())[:_MOST_SAMPLES]
    ]
    more = ["..."] if len(positions) > _MOST_SAMPLES else []
    count = f"{len(numbers)} of {len(bad_n)} tokens"
    return f"the logits of {count} ({'; '.join([*samples, *more])})"


def first_few(numbers: Sequence[int]) -> str:
    """Return the first numbers, and dots where there are more."""
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return shown + (", ..." if len(numbers) > _MOST_NUMBERS else "")
