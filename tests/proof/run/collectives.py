"""Bugs in all-reduces made of messages, and the plans in which gradients are summed so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Collectives, Plan
from echelon.parallel.transport.algorithms import ring
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant


def on_nodes(plan: Plan, each: int, algorithm: str = "hierarchical") -> Plan:
    """Return a plan on nodes of `each` devices, whose gradients are summed by an algorithm."""
    nodes = plan.mesh.world_size // each
    cluster = replace(plan.cluster, devices_per_node=each, nodes=nodes)
    layout_ = replace(plan.layout, collectives=Collectives(algorithm=algorithm))
    return replace(plan, layout=layout_, cluster=cluster)


def summed(*, each: int, algorithm: str = "hierarchical", **chosen: Any) -> Plan:
    """Return a plan of the prover's tests on nodes."""
    return on_nodes(layout(accumulation=1, **chosen), each, algorithm)


@mutant(
    Told(
        "prove-gradients",
        "head.weight",
        "replicas lost",
        "dp",
        plan={"dp": 4, "each": 4, "algorithm": "ring"},
        of=summed,
    ),
    Told(
        "prove-gradients",
        "head.weight",
        "missing sum",
        "dp_replicate",
        plan={"dp": 4, "each": 2},
        of=summed,
    ),
)
def last_chunk_not_passed_on(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """End phase 2 of the ring one step early: each rank keeps its own part of one chunk."""
    gather = ring.gather_phase
    patch.setattr(ring, "gather_phase", lambda *given, **named: gather(*given, **named)[:-1])
