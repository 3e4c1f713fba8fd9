# SPDX-License-Identifier: Apache-2.0
"""What must hold before a module is split, on each rank and among them; and the values they share.

Parameters become those of rank 0, as in DDP, so a seed that differs by rank does no harm. Buffers
(running statistics, masks) stay what they are on each rank in all of training, so they must be
equal at the start: what may differ later is for the module to decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.errors import ConfigError, EnvironmentProblem, InfeasiblePlan, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.islands import LOCAL_SGD_IN_THE_TRAINER
from echelon.core.rulebook.module import (
    MODULE_IGNORE,
    MODULE_MESH,
    MODULE_PARAMETERS,
    MODULE_RANKS,
    MODULE_SAME,
    MODULE_SETTINGS,
)
from echelon.core.rules import did_you_mean
from echelon.parallel.transport.collectives import Group

UNSPLIT = ("pp", "cp", "ep")


def check_plan(plan: Plan, *, cuts: Collection[str] = ()) -> None:
    """Raise InfeasiblePlan where a plan splits or says what only Echelon's own models have.

    `cuts` are the axes over which the caller knows how to cut the computation.
    """
    problems = [
        MODULE_MESH.problem(
            f"mesh.{axis} = {getattr(plan.mesh, axis)} cuts the computation of a module that "
            "is not Echelon's",
            key=f"mesh.{axis}",
            suggestions=(f"mesh.{axis} = 1",),
        )
        for axis in UNSPLIT
        if getattr(plan.mesh, axis) > 1 and axis not in cuts
    ]
    if (every := plan.mathematics.local_sgd.every) > 0:
        problems.append(
            LOCAL_SGD_IN_THE_TRAINER.problem(
                f"local_sgd.every = {every}, but steps of a module are those of all replicas",
                key="local_sgd.every",
                suggestions=("local_sgd.every = 0", "echelon train"),
            )
        )
    problems += [
        MODULE_SETTINGS.problem(message, key=key, suggestions=suggestions)
        for key, message, suggestions in _foreign_settings(plan)
    ]
    if problems:
        raise InfeasiblePlan(problems)


def _foreign_settings(plan: Plan) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield the settings that are about Echelon's own models: key, what it says, suggestions."""
    policy, kind = plan.layout.recompute.policy, plan.mathematics.optimizer.kind
    if policy != "none":
        yield (
            "recompute.policy",
            f'recompute.policy = "{policy}" is about the blocks of Echelon\'s models',
            ['recompute.policy = "none", and torch.utils.checkpoint in your forward'],
        )
    if plan.mathematics.precision.is_fp8:
        yield (
            "precision.matmul",
            'precision.matmul = "fp8" is about the linear layers of Echelon\'s models',
            ['precision.matmul = "parameters"'],
        )
    if plan.layout.zero.gather == "int8":
        yield (
            "zero.gather",
            'zero.gather = "int8" is about the matrices of Echelon\'s models',
            ['zero.gather = "parameters"'],
        )
    if plan.layout.zero.reduce != "exact":
        yield (
            "zero.reduce",
            f'zero.reduce = "{plan.layout.zero.reduce}" is about gradients of Echelon\'s models',
            ['zero.reduce = "exact"'],
        )
    if plan.layout.zero.secondary:
        yield (
            "zero.secondary",
            "zero.secondary = true is about the units of Echelon's models",
            ["zero.secondary = false"],
        )
    if plan.model.experts is not None:
        yield (
            "model.experts.num_experts",
            f"model.experts.num_experts = {plan.model.experts.num_experts}, and what evens loads, "
            "is about the routers of Echelon's models",
            ['a dense model, such as model.preset = "nano": experts are your module\'s'],
        )
    if plan.mesh.servers:
        yield (
            "servers.count",
            f"servers.count = {plan.mesh.servers} keeps Echelon's models, and trains them in "
            "Echelon's loop",
            ["servers.count = 0: data ranks sum the gradients of a module"],
        )
    if OPTIMIZERS[kind].others is not None:
        yield (
            "optimizer.kind",
            f'optimizer.kind = "{kind}" is for the matrices of hidden layers, and which of a '
            "module are these is not known",
            [
                f'optimizer.kind = "{name}"'
                for name, record in OPTIMIZERS.items()
                if record.others is None
            ],
        )


def check_ranks(plan: Plan) -> int:
    """Return this rank; EnvironmentProblem unless as many ranks as the mesh has have joined."""
    wanted = plan.mesh.world_size
    joined = dist.is_available() and dist.is_initialized()
    if joined and dist.get_world_size() == wanted:
        return dist.get_rank()
    if not joined and wanted == 1:
        return 0
    there = f"{dist.get_world_size()} ranks have joined" if joined else "no process group is there"
    raise EnvironmentProblem(
        MODULE_RANKS.problem(
            f"the mesh of the plan has {wanted} ranks, and {there}",
            suggestions=(
                f"torchrun --nproc-per-node {wanted} SCRIPT, with "
                "torch.distributed.init_process_group before parallelize",
            ),
        )
    )


def managed_parameters(model: nn.Module, ignore: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters to split, by their first name: real numbers that are not ignored.

    ConfigError where there is nothing to train, or a parameter cannot be split.
    """
    named = dict(model.named_parameters())
    # A shared parameter has several names, and each of them will do.
    every = list(model.named_parameters(remove_duplicate=False))
    problems: list[Problem] = []
    ignored: set[int] = set()
    for wanted in ignore:
        found = {id(one) for name, one in every if _within(name, wanted)}
        ignored |= found
        if not found:
            known = [*(name for name, _ in every), *(n for n, _ in model.named_modules() if n)]
            problems.append(
                MODULE_IGNORE.problem(
                    f"ignore names {wanted!r}, which is no parameter and holds none",
                    key="ignore",
                    suggestions=did_you_mean(wanted, known),
                )
            )
    kept = {
        name: one
        for name, one in named.items()
        if id(one) not in ignored and (one.is_floating_point() or one.requires_grad)
    }
    problems += [
        MODULE_PARAMETERS.problem(message, suggestions=(instead,))
        for message, instead in _unfit(kept)
    ]
    if not problems and not any(parameter.requires_grad for parameter in kept.values()):
        problems.append(MODULE_IGNORE.problem("the module has no parameter that is trained"))
    if problems:
        raise ConfigError(problems)
    return kept


def _unfit(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield why parameters cannot be split, each with what to write instead."""
    meta = [name for name, one in parameters.items() if one.is_meta]
    if meta:
        yield (
            f"{_some(meta)} on the meta device: there are no values to start from",
            "model.to_empty(device=...), then your own initialisation",
        )
    devices = sorted({str(one.device) for one in parameters.values()})
    if len(devices) > 1:
        yield f"parameters are on {' and '.join(devices)}", f"model.to({devices[-1]!r})"
    unreal = [name for name, one in parameters.items() if not one.is_floating_point()]
    if unreal:
        yield f"{_some(unreal)}, trained and not of real numbers", "ignore=[...]"


def agree_on_module(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], plan: Plan, world: Group
) -> None:
    """Raise ConfigError, the same on every rank, where ranks hold different modules."""
    mine: dict[str, str] = {"the plan": plan.content_hash()}
    for name, one in parameters.items():
        kind = "trained" if one.requires_grad else "frozen"
        mine[f"parameter {name}"] = f"{tuple(one.shape)} {one.dtype} {kind}"
    for name, one in model.named_buffers():
        mine[f"buffer {name}"] = f"{tuple(one.shape)} {one.dtype} {_digest(one)}"
    ranks: list[dict[str, str]] = world.gather_objects(mine)
    for other, said in enumerate(ranks):
        keys = [key for key in {**ranks[0], **said} if ranks[0].get(key) != said.get(key)]
        if keys or list(said) != list(ranks[0]):
            key = keys[0] if keys else "the order of parameters"
            first, second = (one.get(key, "not there") for one in (ranks[0], said))
            raise ConfigError(
                MODULE_SAME.problem(
                    f"{key} is not the same on ranks 0 and {other}: {first} and {second}"
                    + (f" ({len(keys) - 1} more differ)" if len(keys) > 1 else "")
                )
            )


@torch.no_grad()
def share_values(parameters: Mapping[str, nn.Parameter], world: Group) -> None:
    """Give every rank the parameters of rank 0, bit for bit."""
    if world.size == 1:
        return
    for name, parameter in parameters.items():
        bits = parameter.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if world.index != 0:
            bits.zero_()
        # A sum of bytes of which all but one are zero keeps the bits, those of NaN and -0 too.
        world.all_reduce(bits.view(torch.uint8), name=f"start.{name}").wait()
        parameter.copy_(bits.view(parameter.shape))


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.numel() == 0:
        return "empty"
    flat: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(flat.tobytes()).hexdigest()[:16]


def _within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" + (" are" if more else " is")
