# SPDX-License-Identifier: Apache-2.0
"""The oracle of local SGD: one process that trains the islands one after another.

Each island is a training of its own (`OracleRun`): its rows of the batch, its parameters, its
optimizer. When they meet, what each moved away from the outer parameters is averaged, tensor by
tensor under canonical names, and the outer step is a formula. Written apart from the engine.

Douillard et al., "DiLoCo", 2023, algorithm 1; in fragments and late: "Streaming DiLoCo", 2025,
algorithm 2, whose merge keeps half of what an island has where the outer step comes late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from echelon.layout.islands import island_plan
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.optimizers import TensorUpdate
from echelon.proof.oracle.oracle import OracleRun, OracleStep

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """Hold the outer step at the end of an inner one; of tensors that it leaves alone, nothing."""

    step: int
    """The inner step."""
    moved: Sequence[Tensors]
    """What each island had moved away from the outer parameters when the tensors met."""
    before: Tensors
    """Outer parameters before it: all of them."""
    momentum_before: Tensors
    """Their momentum before it; zeros at first, and always of plain SGD."""
    after: Tensors
    """All outer parameters after it."""
    momentum_after: Tensors
    """All momentum after it."""

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the tensors that the outer step changes."""
        return tuple(self.moved[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandOracle:
    """Hold the steps of each island, and the outer step at the end of each."""

    islands: tuple[tuple[OracleStep, ...], ...]
    outer: tuple[OuterStep, ...]


def run_islands(
    plan: Plan,
    num_steps: int,
    *,
    factor: float = 1.0,
    forced: Sequence[Sequence[ForcedRouting] | None] | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> IslandOracle:
    """Return `num_steps` of every island of `plan`; other arguments as of `run_oracle`.

    `forced` has an entry for each island; all islands begin from `initial`.
    """
    local = plan.mathematics.local_sgd
    runs = [
        OracleRun(island_plan(plan, index), factor=factor, initial=initial)
        for index in range(local.islands)
    ]
    outer = {
        name: value.to(torch.promote_types(value.dtype, torch.float32))
        for name, value in runs[0].values.items()
    }
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    met: dict[str, list[torch.Tensor]] = {}
    due: dict[int, list[str]] = {}
    steps: list[list[OracleStep]] = [[] for _ in runs]
    rounds: list[OuterStep] = []
    for step in range(num_steps):
        given = [None if forced is None else forced[i] for i in range(len(runs))]
        found = [
            run.step(step, told[step] if told else None)
            for run, told in zip(runs, given, strict=True)
        ]
        meeting = [name for name in outer if meets(local, name, step)]
        for name in meeting:
            met[name] = [as_sent(local, outer[name] - run.values[name]) for run in runs]
        due[step + local.delay] = meeting
        one = _outer_step(local, step, due.pop(step, []), met, outer, momentum)
        rounds.append(one)
        outer, momentum = dict(one.after), dict(one.momentum_after)
        for run, said, island in zip(runs, found, steps, strict=True):
            for name in one.changed:
                merged = outer[name]
                if local.delay:
                    merged = 0.5 * run.values[name] + 0.5 * outer[name]
                run.values[name] = merged.to(run.values[name].dtype)
            island.append(_with_outer(said, run.values, one.changed))
    return IslandOracle(islands=tuple(map(tuple, steps)), outer=tuple(rounds))


def _outer_step(
    local: LocalSgd,
    step: int,
    names: Sequence[str],
    met: Mapping[str, Sequence[torch.Tensor]],
    outer: Tensors,
    momentum: Tensors,
) -> OuterStep:
    after, momentum_after = dict(outer), dict(momentum)
    for name in names:
        mean = torch.stack(list(met[name])).sum(0) / local.islands
        after[name], momentum_after[name] = outer_formula(local, outer[name], mean, momentum[name])
    return OuterStep(
        step=step,
        moved=[{name: met[name][i] for name in names} for i in range(local.islands)],
        before=dict(outer),
        momentum_before=dict(momentum),
        after=after,
        momentum_after=momentum_after,
    )


def outer_formula(
    local: LocalSgd, parameter: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a parameter and its momentum after an outer step from the `mean` of what moved.

    Sutskever et al., 2013, as torch writes it: m = u m + d; p = p - r (d + u m).
    """
    if local.outer == "sgd":
        return parameter - local.outer_learning_rate * mean, momentum
    momentum = local.outer_momentum * momentum + mean
    ahead = mean + local.outer_momentum * momentum
    return parameter - local.outer_learning_rate * ahead, momentum


def as_sent(local: LocalSgd, moved: torch.Tensor) -> torch.Tensor:
    """Return what the others get of what an island moved: itself, or what codes of 8 bits say.

    Consecutive numbers of a row share a scale: the largest of them over the largest code.
    """
    if local.gradients == "fp32":
        return moved
    rows = moved.view(1, -1) if moved.dim() == 1 else moved
    blocks = [_block_as_sent(local, block) for block in rows.split(local.outer_block, dim=1)]
    return torch.cat(blocks, dim=1).view_as(moved)


def _block_as_sent(local: LocalSgd, block: torch.Tensor) -> torch.Tensor:
    """Return one block of each row [R, B] as its codes say."""
    most = block.abs().amax(dim=1, keepdim=True)
    scale = torch.where(most > 0, most / (127 if local.gradients == "int8" else 448), 1.0)
    codes = block / scale
    if local.gradients == "int8":
        return codes.round() * scale
    return _e4m3(codes.float()).to(block.dtype) * scale


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of at most 448 rounded to 1 + 3 binary digits, and below 2^-6 to 2^-9."""
    exponent = torch.floor(torch.log2(x.abs().clamp_min(2.0**-6)))
    step = torch.exp2(exponent - 3)
    return (x / step).round() * step


def meets(local: LocalSgd, name: str, step: int) -> bool:
    """Return whether a tensor meets after `step`: each fragment once a round, the last at its end.

    Block b of a model is in fragment b mod P; what is before the blocks in the first, what is after
    them in the last.
    """
    fragment = local.fragments - 1
    if name.startswith("layers."):
        fragment = int(name.split(".")[1]) % local.fragments
    elif name.startswith(("embedding.", "positions.")):
        fragment = 0
    # The first fragment meets first: after 1/P of a round.
    place = local.every * (fragment + 1) // local.fragments
    return (step + 1 - place) % local.every == 0


def _with_outer(step: OracleStep, values: Tensors, changed: Sequence[str]) -> OracleStep:
    """Return an inner step with what its island goes on with, and all that was added to it."""
    updates = dict(step.updates)
    for name in changed:
        added = values[name] - step.before[name]
        updates[name] = TensorUpdate(main=added, decay=torch.zeros_like(added))
    return replace(step, after=dict(values), updates=updates)
