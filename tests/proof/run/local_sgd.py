"""Bugs in the outer steps of local SGD, and the plans of islands in which they are planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.plan import Plan
from echelon.training.local_sgd import outer_steps, quantised
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant

NESTEROV: dict[str, Any] = {
    "outer": "nesterov",
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.9,
}


def with_islands(plan: Plan, islands: int = 2, **local: Any) -> Plan:
    """Return a plan with so many islands, each of which is as the plan's mesh without replicas."""
    mesh = replace(plan.mesh, dp_replicate=islands, replicas_outermost=True)
    mathematics = replace(
        plan.mathematics,
        global_sequences=plan.mathematics.global_sequences * islands // plan.mesh.dp_replicate,
        local_sgd=LocalSgd(**{"every": 2, "islands": islands, **local}),
    )
    return replace(plan, mathematics=mathematics, layout=replace(plan.layout, mesh=mesh))


def plain(**local: Any) -> Plan:
    """Return two islands of one rank."""
    return with_islands(layout(accumulation=1), **local)


@mutant(
    Told(
        "prove-outer-step",
        "embedding.weight",
        "momentum reset",
        "dp_replicate",
        step=3,
        plan=NESTEROV,
        of=plain,
    )
)
def momentum_reset(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Begin each round with a momentum of zero."""
    update = outer_steps.outer_update

    def forgetful(
        local: LocalSgd,
        parameters: torch.Tensor,
        mean: torch.Tensor,
        momentum: torch.Tensor | None,
    ) -> None:
        update(local, parameters, mean, None if momentum is None else momentum.zero_())

    patch.setattr(outer_steps, "outer_update", forgetful)


@mutant(
    Told(
        "prove-outer-step",
        "embedding.weight",
        "unfair mean",
        "dp_replicate",
        step=1,
        of=plain,
    ),
    Told(
        "prove-outer-step",
        "embedding.weight",
        "unfair mean",
        "dp_replicate",
        step=1,
        plan=NESTEROV,
        of=plain,
    ),
)
def unfair_averaging(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let what the first island moved count half as much again as it should."""
    start = outer_steps.OuterSteps._start

    def unfair(self: Any, bucket: Any, fragment: int, moved: torch.Tensor) -> None:
        kept = self._parameters[bucket.name].clone()
        if self._islands.index == 0:
            values = self._values[bucket.name]
            self._parameters[bucket.name].add_(kept - values, alpha=0.5)
        start(self, bucket, fragment, moved)
        self._parameters[bucket.name].copy_(kept)

    patch.setattr(outer_steps.OuterSteps, "_start", unfair)


@mutant(
    Told(
        "prove-outer-step",
        "embedding.weight",
        "islands",
        "dp_replicate",
        step=1,
        of=plain,
    )
)
def sum_for_mean(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add up what islands moved, and do not divide."""
    update = outer_steps.outer_update

    def added(local: LocalSgd, parameters: torch.Tensor, mean: torch.Tensor, m: Any) -> None:
        update(local, parameters, mean * local.islands, m)

    patch.setattr(outer_steps, "outer_update", added)


@mutant(
    Told(
        "prove-outer-step",
        "embedding.weight",
        "wrong scale",
        "dp_replicate",
        step=1,
        plan={"gradients": "int8"},
        of=plain,
    )
)
def scale_of_the_next_block(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Multiply the codes of each block by the scale of the block after it."""
    gathered = quantised._gathered

    def shifted(islands: Any, row: torch.Tensor, name: str) -> torch.Tensor:
        found = gathered(islands, row, name)
        return found.roll(-1, dims=1) if name.endswith(".scales") else found

    patch.setattr(quantised, "_gathered", shifted)


def halves(**local: Any) -> Plan:
    """Return two islands of two tensor ranks, each of which has half of the columns of some."""
    return with_islands(layout(accumulation=1, tp=2), **local)


def _of_columns(
    patch: pytest.MonkeyPatch, change: Callable[[quantised._Part], quantised._Part]
) -> None:
    parts = quantised._parts
    patch.setattr(quantised, "_parts", lambda *args: tuple(map(change, parts(*args))))


@mutant(
    Told(
        "prove-outer-step",
        "layers.0.attention.o.weight",
        "none",
        "dp_replicate",
        step=1,
        plan={"gradients": "int8"},
        of=halves,
    )
)
def blocks_begin_with_the_columns_of_a_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the scale of the first block of a row for the first that a rank has a part of."""
    _of_columns(
        patch,
        lambda part: replace(part, first_block=part.first_block - part.columns.start // part.block),
    )


@mutant(
    Told(
        "prove-outer-step",
        "layers.0.attention.o.weight",
        "none",
        "dp_replicate",
        step=1,
        plan={"gradients": "int8"},
        of=halves,
    )
)
def blocks_are_counted_from_the_columns_of_a_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Cut the columns of a rank into blocks of its own."""

    def block_of_column(self: quantised._Part, device: torch.device) -> torch.Tensor:
        return torch.arange(len(self.columns), device=device) // self.block

    patch.setattr(quantised._Part, "block_of_column", block_of_column)
