"""What ranks run in the tests of the optimizer of a split module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.plan import Optimizer, Plan, Zero
from echelon.launch.context import RankContext
from echelon.training.module.optimizer import ModuleOptimizer, ModuleStep
from tests.parallel.layouts import plan_of
from tests.parallel.module.models import loss_of, make, tokens
from tests.parallel.module.targets import Values, full

SHAPES = {name: tuple(one.shape) for name, one in make("transformer").named_parameters()}

OPTIMIZER = Optimizer(total_steps=20, warmup_steps=3, learning_rate=1e-2, eps=1e-3)


def plan(stage: Any, **changes: Any) -> Plan:
    """Return a plan over two ranks."""
    mesh: dict[str, Any] = {"dp_shard" if stage else "dp": 2}
    zero = Zero(stage=stage, accumulate="slices" if stage > 1 else "whole")
    return plan_of(**{"zero": zero, "optimizer": OPTIMIZER, **mesh, **changes})


def steps(
    model: nn.Module, optimizer: ModuleOptimizer, rank: int, start: int, stop: int
) -> list[ModuleStep]:
    """Take steps on this rank's tokens."""
    reports: list[ModuleStep] = []
    for step in range(start, stop):
        loss_of(model, tokens(step, 0, rank)).backward()
        reports.append(optimizer.step())
    return reports


def everything(optimizer: ModuleOptimizer) -> Values:
    """Return every whole tensor, on rank 0."""
    found: Values = {}
    optimizer.full_state(lambda kind, name, one: found.__setitem__(f"{kind} {name}", one))
    return found


def resume(context: RankContext, argument: tuple[Plan, str]) -> tuple[Values, Values]:
    """Return all tensors after four steps, and after two, a file, and two more."""
    plan, folder = argument
    path = Path(folder, f"{context.rank}.pt")
    model, optimizer = parallelize(make("transformer"), plan)
    steps(model, optimizer, context.rank, 0, 2)
    torch.save(optimizer.state_dict(), path)
    steps(model, optimizer, context.rank, 2, 4)
    straight = everything(optimizer)
    model, optimizer = parallelize(make("transformer"), plan)
    optimizer.load_state_dict(torch.load(path))
    steps(model, optimizer, context.rank, 2, 4)
    return straight, everything(optimizer)


def full_states(
    context: RankContext, plan: Plan
) -> tuple[set[str], dict[str, tuple[int, ...]], bool]:
    """Return the kinds and the shapes of the full state; whether `whole` shows the same values."""
    model, optimizer = parallelize(make("transformer"), plan)
    steps(model, optimizer, context.rank, 0, 2)
    found = everything(optimizer)
    with optimizer.whole():
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
    shown = {
        name.removeprefix("parameters "): one
        for name, one in found.items()
        if name.startswith("parameters ")
    }
    return (
        {name.split()[0] for name in found},
        {name: tuple(one.shape) for name, one in shown.items()},
        all(torch.equal(one, values[name]) for name, one in shown.items()),
    )


def refused_while_whole(context: RankContext, case: tuple[Plan, str]) -> tuple[list[str], bool]:
    """Return the rules of what is refused inside of `whole`, and whether all is as before it."""
    plan, file = case
    model, optimizer = parallelize(make("transformer"), plan)
    steps(model, optimizer, context.rank, 0, 2)
    before, state = everything(optimizer), optimizer.state_dict()
    optimizer.save(file)
    calls: list[Callable[[], Any]] = [
        *(optimizer.step, optimizer.state_dict, lambda: everything(optimizer)),
        *(lambda: optimizer.load_state_dict(state), lambda: optimizer.load(file)),
    ]
    rules: list[str] = []
    with optimizer.whole():
        shown = {name: one.detach().clone() for name, one in model.named_parameters()}
        with optimizer.whole():
            nested = {name: one.detach().clone() for name, one in model.named_parameters()}
        for call in calls:
            try:
                call()
            except EchelonError as error:
                rules += error.rules
    same = all(torch.equal(shown[name], one) for name, one in nested.items())
    now = everything(optimizer)
    return rules, same and all(torch.equal(now[name], one) for name, one in before.items())


def load_whole(context: RankContext, plan: Plan) -> tuple[list[str], list[str], bool]:
    """Return what differs after loading other values; whether looking alone changes nothing."""
    model, optimizer = parallelize(make("transformer"), plan)
    steps(model, optimizer, context.rank, 0, 2)
    before = everything(optimizer)
    with optimizer.whole():
        given = {name: one.detach() * 0.5 for name, one in model.state_dict().items()}
    looked = everything(optimizer)
    untouched = all(torch.equal(before[name], looked[name]) for name in before)
    with optimizer.whole():
        model.load_state_dict(given)
    now = full(optimizer)
    masters = full(optimizer, "master")
    return (
        [name for name, one in now.items() if not torch.equal(one, given[name])],
        [name for name, one in masters.items() if not torch.equal(one, given[name].to(one.dtype))],
        untouched,
    )


def ignore_a_block(context: RankContext, plan: Plan) -> tuple[float, bool, list[str]]:
    """Return a value of an ignored block, whether it has a gradient, and all that is split."""
    model = make("transformer")
    with torch.no_grad():
        model.get_parameter("blocks.1.norm.bias").fill_(float(context.rank))
    model, optimizer = parallelize(model, plan, ignore=["blocks.1"], units=["blocks.0", "blocks.2"])
    steps(model, optimizer, context.rank, 0, 2)
    bias = model.get_parameter("blocks.1.norm.bias")
    return float(bias[0]), bias.grad is not None, list(full(optimizer))


def reports(context: RankContext, plan: Plan) -> list[ModuleStep]:
    """Return the reports of four steps."""
    model, optimizer = parallelize(make("transformer"), plan)
    return steps(model, optimizer, context.rank, 0, 4)


def read_after_step(context: RankContext, plan: Plan) -> tuple[Values, Values]:
    """Return the parameters that a loop reads after a step, and those that the state has."""
    model, optimizer = parallelize(make("transformer"), plan)
    steps(model, optimizer, context.rank, 0, 2)
    seen = {name: one.detach().clone() for name, one in model.named_parameters()}
    return full(optimizer), seen
