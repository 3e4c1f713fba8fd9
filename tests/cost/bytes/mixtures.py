"""Small mixtures, their plans, and records of how they were routed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.cost.bytes.sent import bytes_sent
from echelon.layout.expert_load import (
    ExpertLoad,
)
from tests.parallel.layouts import LAPTOP, MIXTRAL, plan_of

AUX = Balance(kind="aux", aux_coefficient=0.1)


BY_SEQUENCE = replace(AUX, aux_over="sequence")


TIGHT = replace(AUX, capacity_factor=1.0)


PIECES = ExpertLayout(expert_tp=2)


TWO_HOPS = ExpertLayout(dispatch="two-hop")


FOUR = replace(MIXTRAL, layers=1, experts=Experts(num_experts=4, top_k=2, ffn=12))
"""One layer, four experts, two of them for each token."""


def on_nodes(devices: int, **changes: Any) -> Plan:
    """Return a plan for nodes of so many devices."""
    plan = plan_of(**changes)
    return replace(plan, cluster=replace(LAPTOP, devices_per_node=devices, nodes=8 // devices))


def terms(plan: Plan, rank: int, load: ExpertLoad | None = None) -> dict[tuple[str, str], int]:
    """Return the bytes of each term of a rank."""
    return {(term.axis, term.name): term.bytes for term in bytes_sent(plan, rank, load)}


def recorded(num_experts: int, *choices: list[list[int]]) -> ExpertLoad:
    """Return the load of one layer and microbatch: the choices of the rows of each member."""
    rows = tuple(np.array(one, dtype=np.int64) for one in choices)
    return ExpertLoad(num_experts=num_experts, choices={(0, 0): rows})
