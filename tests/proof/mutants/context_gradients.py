"""Bugs in the gradients of a sequence that is split over context ranks, and in who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.core.axis import DATA_AXES
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.parallel import apply
from echelon.parallel.context import gathered, ring
from echelon.parallel.context.ulysses import PositionsToHeads
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.training import engine
from echelon.training.engine import TrainEngine
from tests.proof.mutants.context_layouts import HEAD, MQA, in_gradients, split
from tests.proof.mutants.planting import LAST, Told, change_routes, mutant
from tests.proof.mutants.reductions import scale_microbatches


def _passed_on(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Return what the rank before has; give the next one x."""
    before, after = (group.index - 1) % group.size, (group.index + 1) % group.size
    x = x.contiguous()
    got = torch.empty_like(x)
    group.exchange({after: x}, {before: got}, name="wrong").wait()
    return got


@mutant(
    in_gradients(split("ring"), "wrong rank"),
    in_gradients(split("striped", 4), "wrong rank"),
    in_gradients(split("ring", tp=2, pp=2), "wrong rank"),
    in_gradients(split("ulysses-ring", 4, 2), "wrong rank"),
)
def keys_home_to_the_next_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Send the gradients of keys and values one place too far around the ring."""
    backward = ring.RingAttention.backward

    def further(ctx: Any, dout: torch.Tensor) -> Any:
        dq, dk, dv, _ = backward(ctx, dout)
        dk, dv = _passed_on(
            ctx.ring_context.ring, torch.stack([x for x in (dk, dv) if x is not None])
        )
        return dq, dk, dv, None

    patch.setattr(ring.RingAttention, "backward", staticmethod(further))


@mutant(
    in_gradients(split("ring"), "wrong rank"),
    in_gradients(split("ring", dp=2, zero={"stage": 3}), "wrong rank"),
)
def others_home_to_the_next_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Send what other ranks made of a block's gradients to the rank after the one that holds it."""
    finish = ring._RingGradients.finish

    def wrong(self: Any, step: int) -> None:
        if step < self._plan.degree:
            return finish(self, step)
        own = self.tensor(self._plan.ring_rank)
        before = own.clone()
        finish(self, step)
        own.copy_(before + _passed_on(self._ring, own - before))
        return None

    patch.setattr(ring._RingGradients, "finish", wrong)


@mutant(
    in_gradients(split("gathered"), "wrong rank"),
)
def reduce_scatter_by_position(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut the gradients of gathered keys into contiguous chunks."""

    def scatter(self: Any, gradients: torch.Tensor, *, name: str) -> torch.Tensor:
        own = gradients.new_empty((gradients.shape[0] // self.ring.size, *gradients.shape[1:]))
        self.ring.reduce_scatter(own, gradients, name=name)
        return own

    patch.setattr(gathered._AllKeys, "scatter", scatter)


@mutant(
    in_gradients(split("gathered"), "missing sum"),
)
def gathered_gradients_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Keep of the gradients of gathered keys what this rank made of its own positions."""

    def own_only(self: Any, gradients: torch.Tensor, *, name: str) -> torch.Tensor:
        whole = gradients[gathered.positions_of(self._runs, gradients.device)]
        return whole.chunk(self.ring.size)[self.ring.index].clone()

    patch.setattr(gathered._AllKeys, "scatter", own_only)


@mutant(
    in_gradients(split("ring", 4), "stale"),
    in_gradients(split("striped"), "missing sum"),
)
def last_gradients_not_awaited(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the gradients of the own keys before what comes last has been added."""
    finish = ring._RingGradients.finish

    def early(self: Any, step: int) -> None:
        if step == self._plan.degree and self._transfer is not None:
            self._transfer.pending.wait()
            self._transfer.arrivals.clear()
        finish(self, step)

    patch.setattr(ring._RingGradients, "finish", early)


@mutant(
    in_gradients(split("ulysses"), "wrong rank"),
)
def exchanged_home_to_the_next_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give the gradients of exchanged queries, keys and values to the next member."""
    backward = PositionsToHeads.backward

    def further(ctx: Any, dq: Any, dk: Any, dv: Any) -> Any:
        found = backward(ctx, dq, dk, dv)
        return *(_passed_on(ctx.group, x) for x in found[:3] if x is not None), None, None

    patch.setattr(PositionsToHeads, "backward", staticmethod(further))


@mutant(
    in_gradients(split("ulysses", model=MQA), "2"),
    in_gradients(split("ulysses", 4, model=MQA), "2"),
)
def copies_added_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add the gradients of the copies of key/value heads a second time."""
    backward = PositionsToHeads.backward

    def twice(ctx: Any, dq: Any, dk: Any, dv: Any) -> Any:
        dq, dk, dv, *rest = backward(ctx, dq, dk, dv)
        return dq, 2 * dk, 2 * dv, *rest

    patch.setattr(PositionsToHeads, "backward", staticmethod(twice))


@mutant(
    in_gradients(split("ulysses", 4, model=MQA), "missing sum"),
)
def copies_not_added(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the gradient of the first copy of a key/value head for that of the head."""
    backward = PositionsToHeads.backward

    def first(ctx: Any, dq: Any, dk: Any, dv: Any) -> Any:
        copies, ctx.copies = ctx.copies, 1
        dq, dk, dv, *rest = backward(ctx, dq, dk, dv)
        dk, dv = (x.unflatten(2, (-1, copies))[:, :, :, 0] for x in (dk, dv))
        return dq, dk, dv, *rest

    patch.setattr(PositionsToHeads, "backward", staticmethod(first))


@mutant(
    in_gradients(split("ring"), "missing sum", HEAD),
    in_gradients(split("striped", dp=2), "missing sum", HEAD),
)
def not_summed_over_context(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum gradients over data ranks alone."""

    def data_only(route: Any, groups: RankGroups) -> Any:
        for ranks in plan.mesh.groups(*DATA_AXES):
            made: Any = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if groups.rank in ranks:
                talk = None if made is None else Communicator(ranks, made, "dp")
                route = replace(route, data=Group("dp", ranks, groups.rank, talk, groups.recorder))
        return route

    change_routes(patch, data_only, of=(False,))


@mutant(
    in_gradients(split("ring", zero={"stage": 2}), "missing sum", HEAD),
)
def slices_not_summed_over_context(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut slices over data and context ranks, of what this context rank has made alone."""
    first_hop = GradientReduction._start_first_sum
    mesh = plan.mesh

    def alone(self: GradientReduction, bucket: Any, hops: Sequence[Group]) -> Any:
        shard = self._groups[bucket.plan.expert].shard
        assert shard is not None
        assert mesh.dp == 1
        whole = bucket.gradients.to(self._dtype, copy=True)
        flight = first_hop(self, bucket, list(hops))
        flight.pending.wait()
        flight.sum.copy_(whole.chunk(shard.size)[shard.index])
        return flight

    patch.setattr(GradientReduction, "_start_first_sum", alone)


@mutant(
    in_gradients(split("ring", accumulation=1), "mean of means", HEAD),
)
def divided_by_own_tokens(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide each context rank's loss by the tokens of its own positions."""

    def factor(microbatch: int, batch: TokenBatch, scale: float) -> float:
        assert plan.num_microbatches == 1
        return 1 / (plan.mesh.cp * batch.num_valid() * scale)

    scale_microbatches(patch, factor)


@mutant(
    Told("prove-loss", "loss", "missing sum", "cp", plan=split("gathered")),
)
def loss_of_own_positions(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Report the mean loss of the rank's own positions; gradients are right."""
    step = TrainEngine.step

    def own(self: TrainEngine, batches: Sequence[TokenBatch], number: int) -> Any:
        result = step(self, batches, number)
        said = result.microbatch_losses.values()
        mean = sum(loss for loss, _ in said) / sum(count for _, count in said)
        return replace(result, loss=mean)

    patch.setattr(TrainEngine, "step", own)


@mutant(
    Told(
        "prove-gradient-norm",
        "gradient norm",
        "sqrt(cp)",
        "cp",
        plan=split("ring", 4, accumulation=3),
    ),
)
def norm_per_context_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Count whole gradients in the norm once for each context rank."""

    def counts(bucket: Any, flat: Any, groups: Any) -> bool:
        return groups.data.index < plan.mesh.cp

    patch.setattr(engine, "is_first_copy", counts)


@mutant(
    in_gradients(
        split("ring", dp=2, zero={"stage": 1}),
        "slices permuted",
        f"{LAST}.mlp.gate.weight",
        "dp_shard and cp",
    ),
)
def slices_in_another_order(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Number slices context rank by context rank; the collectives number them the other way."""
    rule = apply.bucket_rule
    shards, contexts = plan.mesh.dp_shard, plan.mesh.cp

    def turned(*arguments: Any) -> Any:
        right = rule(*arguments)
        shard, context = divmod(right.slicing.index, contexts)
        return replace(right, slicing=replace(right.slicing, index=context * shards + shard))

    patch.setattr(apply, "bucket_rule", turned)
