# SPDX-License-Identifier: Apache-2.0
"""What was seen of a module is not believed: each stage is run alone, and compared.

A stage gets the stream that the whole module had there, and all parameters that are not its own
read as NaN. If it depends on anything of another stage, by whatever way, the result is NaN; if it
leaves something out, the result is another. Both are refused before training begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from echelon.core.axis import Axis
from echelon.core.errors import ConfigError, Problem, RunFailed
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_CHAIN, MODULE_SHARED
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.pipeline.chain import BlockChain
from echelon.parallel.module.pipeline.stage import ModuleMicrobatch, ModuleStage, hide, show
from echelon.parallel.module.pipeline.trace import (
    EPILOGUE,
    PROLOGUE,
    Trace,
    follow,
    leaving_no_trace,
    set_random_state,
)
from echelon.parallel.module.tensor.ranks import sums_of
from echelon.parallel.transport.collectives import Group

_ROUNDING = 1e3
"""Units of rounding by which a device may compute the same differently."""


def stages_of_parameters(
    chain: BlockChain,
    trace: Trace,
    named: Mapping[str, nn.Parameter],
    stages: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter; ConfigError where they cannot share it.

    One that nothing used is of its block's stage, or of the first.
    """
    last = len(stages) - 1
    stage_of = {chain.names[block]: at for at, blocks in enumerate(stages) for block in blocks}
    of_part = {PROLOGUE: 0, EPILOGUE: last, **stage_of}
    found = {name: {of_part[part] for part in trace.uses[name]} for name in named}
    for block_name, block in chain.blocks.items():
        inside = {id(one) for one in block.parameters()}
        for name, one in named.items():
            if id(one) in inside:
                found[name].add(stage_of[block_name])
    shared = {n: sorted(at) for n, at in found.items() if len(at) > 1 and at != {0, last}}
    problems: list[Problem] = [
        MODULE_SHARED.problem(
            f"{name} is used in stages {', '.join(map(str, at))}",
            key="pipeline.stages",
            suggestions=("pipeline.stages with both uses in one stage", "mesh.pp = 1"),
        )
        for name, at in shared.items()
    ]
    if problems:
        raise ConfigError(problems)
    return {name: tuple(sorted(at or {0})) for name, at in found.items()}


@torch.no_grad()
def check_stages(
    named: Mapping[str, nn.Parameter],
    stages: Collection[ModuleStage],
    trace: Trace,
    stages_of: Mapping[str, Sequence[int]],
) -> None:
    """Run each stage of this rank alone on the example; ConfigError where it is not the module's.

    The caller saves and restores random numbers and buffers.
    """
    for stage in stages:
        window = stage.window
        foreign = {n: p for n, p in named.items() if window.stage not in stages_of[n]}
        received = trace.streams.get(window.start)
        device = next(iter(named.values())).device
        set_random_state(trace.random[-1], device)
        stage.on_enter = partial(set_random_state, trace.random[window.start], device)
        kept = hide(foreign)
        try:
            x = None if window.first or received is None else received.clone()
            out = stage(x, ModuleMicrobatch(index=0, batch=trace.example))
        except RunFailed as error:
            raise ConfigError(list(error.problems)) from error
        finally:
            show(foreign, kept)
            stage.on_enter = lambda: None
        expected = trace.loss if window.last else trace.streams[window.stop]
        what = "its loss" if window.last else "its stream"
        if not _equal(out, expected):
            raise ConfigError(
                MODULE_CHAIN.problem(
                    f"stage {window.stage}, run alone, gives another result than the whole module: "
                    f"{what} {_difference(out, expected)}",
                    key="split",
                    suggestions=("mesh.pp = 1",),
                )
            )


@torch.no_grad()
def check_same_on_ranks(
    plan: Plan, model: nn.Module, chain: BlockChain, loss: ModuleLoss, example: Batch, world: Group
) -> None:
    """ConfigError on every rank where one has another loss: its forward depends on the rank.

    All call it with the same values. Only ranks that compute one batch together, and were given the
    same example, are compared.
    """
    with leaving_no_trace(model):
        torch.manual_seed(0)
        found = follow(model, chain, loss, example, at=frozenset()).loss
    given = [sums_of(one) for one in example.values() if isinstance(one, torch.Tensor)]
    limit = _ROUNDING * torch.finfo(found.dtype).eps * abs(float(found))
    told: list[tuple[object, float]] = world.gather_objects((given, float(found)))
    for rank, (batch, one) in enumerate(told):
        first = plan.mesh.group(rank, Axis.PP, Axis.CP, Axis.TP)[0]
        other, right = told[first]
        if batch == other and not abs(one - right) <= limit:
            raise ConfigError(
                MODULE_CHAIN.problem(
                    f"the loss of the example is {right:.9g} on rank {first} and {one:.9g} on rank "
                    f"{rank}, which compute one batch together: the forward depends on the rank",
                    key="split",
                    suggestions=("a forward that is the same on every rank",),
                )
            )


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = _ROUNDING * torch.finfo(expected.dtype).eps
    return torch.equal(found, expected) or bool(
        (found - expected).abs().max() <= tolerance * expected.abs().max()
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.shape != expected.shape:
        return f"is {tuple(found.shape)}, not {tuple(expected.shape)}"
    if bool(found.isnan().any()):
        return "depends on parameters or activations of another stage (NaN)"
    return f"differs by {float((found - expected).abs().max()):.3g}"
