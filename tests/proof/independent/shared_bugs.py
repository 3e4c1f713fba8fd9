"""Bugs planted in code that the oracle and the ranks share, each with the part it must be told by.

A proof of ranks beside the oracle passes with any of them: both make the same mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, LatentAttention
from echelon.core.plan import Plan
from echelon.proof.shrink import shrink
from tests.proof.layouts import Changes, layout

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class SharedBug:
    """Name a bug: how it is planted, in which model it shows, and what must be told of it."""

    name: str
    plant: Callable[[Patch], None]
    part: str
    tensor: str
    chosen: Changes

    def plan(self) -> Plan:
        """Return the plan that it shows in, shrunk, in float64."""
        chosen = dict(self.chosen)
        balance = chosen.pop("balance", Balance())
        chosen.pop("num_steps", None)
        plan = layout(**{"accumulation": 1, "dp": 2, **chosen})
        mathematics = replace(plan.mathematics, balance=balance)
        return shrink(replace(plan, mathematics=mathematics), precision="fp64")

    @property
    def num_steps(self) -> int:
        """Return the steps after which it shows."""
        return self.chosen.get("num_steps", 1)


BUGS: list[SharedBug] = []


def shared_bug(
    part: str, tensor: str, **chosen: Any
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a function that plants a bug."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(SharedBug(plant.__name__, plant, part, tensor, chosen))
        return plant

    return register


MIXTURE: Changes = {
    "model": {
        "experts": Experts(num_experts=4, top_k=2, ffn=8, router="sigmoid", router_bias=True)
    },
    "balance": Balance(kind="both", aux_over="sequence", z_coefficient=0.001),
}


GROUPS: Changes = {
    "model": {
        "experts": Experts(num_experts=8, top_k=2, ffn=8, router="sigmoid", groups=4, top_groups=2)
    }
}


CROWDED: Changes = {**MIXTURE, "balance": Balance(capacity_factor=1.0)}


LATENT: Changes = {
    "model": {
        "latent": LatentAttention(query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=7),
        "kv_heads": 4,
        "head_dim": 10,
    }
}


def changed(patch: Patch, module: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a function of a module by what `change` makes of its result."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args, **kwargs: change(right(*args, **kwargs)))
