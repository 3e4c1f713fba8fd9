"""Bugs in all-reduces made of messages, and the plans in which gradients are summed so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Collectives, Plan
from echelon.parallel.transport import algorithms
from echelon.parallel.transport.algorithms import Part, Step
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
    gather = algorithms.gather_phase
    patch.setattr(algorithms, "gather_phase", lambda *given, **named: gather(*given, **named)[:-1])


SHARDS: dict[str, Any] = {"dp": 4, "each": 2, "zero": {"stage": 3}}
SEQUENCE: dict[str, Any] = {"tp": 4, "each": 2, "sequence_parallel": True}
"""Plans whose slices, and whose rows, are on two nodes."""


@mutant(
    Told(
        "prove-clipped-update",
        "embedding.weight",
        "slice",
        "dp_shard",
        plan={**SHARDS, "zero": {"stage": 1}},
        of=summed,
    ),
    Told("prove-activations", "embedding", "none", plan=SHARDS, of=summed),
    Told("prove-activations", "layers.0.attention", "number", plan=SEQUENCE, of=summed),
)
def slice_from_the_wrong_node(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Send the others of a node, where slices are gathered, for each node that of the next one."""
    to_all = algorithms._Node.to_all

    def turned(self: algorithms._Node, parts: list[tuple[Part, ...]]) -> Step:
        step, own = to_all(self, parts), parts[self.index]
        following = dict(zip(own, (*own[1:], own[0]), strict=True))
        return replace(step, sends=tuple((place, following[one]) for place, one in step.sends))

    patch.setattr(algorithms._Node, "to_all", turned)


@mutant(
    Told("prove-gradients", "head.weight", "replicas lost", "dp", plan=SHARDS, of=summed),
    Told("prove-activations", "embedding", "number", plan=SEQUENCE, of=summed),
)
def sums_across_nodes_left_out(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """End a hierarchical reduce-scatter before its nodes have added up."""
    patch.setattr(algorithms, "scatter_phase", lambda *given, **named: ())


@mutant(
    Told(
        "prove-gradients",
        "head.weight",
        "missing sum",
        "dp",
        plan={"dp": 3, "each": 3, "algorithm": "ring", "zero": {"stage": 1}},
        of=summed,
    ),
)
def own_slice_is_that_of_the_next(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Scatter around the ring as an all-reduce does: the owner of each sum is one place off."""
    scatter = algorithms.scatter_phase
    patch.setattr(algorithms, "scatter_phase", lambda *given, **named: scatter(*given, ahead=1))
