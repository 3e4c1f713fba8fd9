"""Mistakes that only ranks together can make; each returns what it was told."""

from __future__ import annotations

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from tests.parallel.layouts import plan_of
from tests.parallel.module.models import loss_of, make, tokens
from tests.parallel.module.targets import full

Told = tuple[tuple[str, ...], str]


def different_modules(context: RankContext, kind: str) -> Told:
    """Give `parallelize` another module, or another plan, on rank 1."""
    other = context.rank == 1
    model = nn.Linear(3, 4 if kind == "shape" and other else 3)
    plan = plan_of(dp=2, bucket_bytes=8192 if kind == "plan" and other else 4096)
    if kind == "frozen" and other:
        model.weight.requires_grad_(False)
    if kind == "buffer":
        model.register_buffer("scale", torch.tensor(float(context.rank)))
    if kind == "order" and other:
        model.register_parameter("weight", model._parameters.pop("weight"))
    try:
        parallelize(model, plan)
    except EchelonError as error:
        return error.rules, str(error)
    raise AssertionError("nothing was said")


def leave_out_a_block(context: RankContext, plan: Plan) -> tuple[tuple[str, ...], str, bool]:
    """Leave out a block on rank 1; return whether rank 0 still has the values of the start."""
    model, optimizer = parallelize(make("transformer"), plan)
    before = full(optimizer)
    loss_of(model, tokens(0, 0, context.rank), (2,) if context.rank else ()).backward()
    try:
        optimizer.step()
    except EchelonError as error:
        after = full(optimizer)
        return error.rules, str(error), all(torch.equal(before[n], after[n]) for n in before)
    raise AssertionError("nothing was said")


def rates_by_rank(context: RankContext, plan: Plan) -> Told:
    """Write another learning rate on each rank."""
    model, optimizer = parallelize(make("transformer"), plan, learning_rate="own")
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + context.rank)
    loss_of(model, tokens(0, 0, context.rank)).backward()
    try:
        optimizer.step()
    except EchelonError as error:
        return error.rules, str(error)
    raise AssertionError("nothing was said")
