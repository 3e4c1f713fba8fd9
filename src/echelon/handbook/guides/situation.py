# SPDX-License-Identifier: Apache-2.0
"""The reader's situation, what splits of it would hold, and the questions that guides ask of it.

A question is a function of the situation; its answer has the numbers that it rests on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from echelon.core.cluster import Link, fast_domain
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters, parameters
from echelon.core.plan import Plan, RecomputePolicy, ZeroStage
from echelon.core.units import GB, GIB
from echelon.cost.bytes.model_sizes import StatePrecision, model_states
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.planner.predict.split_memory import (
    GuideSplit,
    RankMemory,
    cost_inputs_from_split,
    kept_of_block,
    rank_memory,
    state_precision,
)

_FAST_LINK = 100e9
"""Bytes/s in one direction from which a link counts as NVLink-like: PCIe 5.0 x16 has 64e9."""

_BLOCKS_A_STAGE = 2
"""A model is deep where each node could be a stage of at least so many blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation(ABC):
    """What a guide may ask about of a model, its batch and a cluster.

    How a run is split is not read. Of a Plan it is a `PlanSituation`; the explorer has its own.
    """

    model: ModelShape
    """Shape of the model."""
    num_parameters: int
    """psi."""
    largest_block: int
    """Weights of the largest block, all of its experts included."""
    precision: StatePrecision
    """Bytes that a weight takes."""
    global_sequences: int
    """Sequences of a step."""
    microbatch_sequences: int
    """Sequences of a microbatch."""
    positions: int
    """Positions of a sequence."""
    memory: int
    """Memory of a device, in bytes."""
    nodes: int
    """Nodes."""
    devices_per_node: int
    """Devices of a node."""
    domain: int
    """Devices that the fast links join: a node, or a rack that is wired as one."""
    links: tuple[Link, ...]
    """Links, fastest first."""

    @abstractmethod
    def inputs(self, split: GuideSplit, recompute: RecomputePolicy | None) -> CostInputs:
        """Return what the formulas read of a split; recompute is the run's own where it is None."""

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def num_domains(self) -> int:
        """Return how many nodes there are, or racks that are wired as one."""
        return -(-self.num_devices // self.domain)

    @property
    def tensor_ranks(self) -> int:
        """Return the tensor ranks of a node; of a rack wired as one, as many as heads allow."""
        if self.domain == self.devices_per_node:
            return self.domain
        return gcd(self.domain, self.model.heads)

    @property
    def inside(self) -> Link | None:
        """Return the link between devices of a node; None where a node has one device."""
        return self.links[0] if self.links and self.domain > 1 else None

    @property
    def between(self) -> Link | None:
        """Return the link between nodes; None where there is one node."""
        return self.links[-1] if self.links and self.num_domains > 1 else None

    def most_data_ranks(self, others: int = 1) -> int:
        """Return over how many ranks the batch can be shared out, `others` ranks to each."""
        by_batch = self.global_sequences // self.microbatch_sequences
        return max(1, min(self.num_devices // others, by_batch))

    def held(self, split: GuideSplit, recompute: RecomputePolicy | None = None) -> RankMemory:
        """Return what the fullest rank of a split would hold."""
        return rank_memory(self.inputs(split, recompute))

    def against(self, num_bytes: float) -> str:
        """Return bytes against the memory of a device, for people."""
        return f"{num_bytes / GIB:,.1f} of {self.memory / GIB:,.1f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSituation(Situation):
    """What a guide may ask about of `plan`."""

    plan: Plan

    @classmethod
    def of(cls, plan: Plan) -> PlanSituation:
        """Return the situation of a plan."""
        cluster = plan.cluster
        return cls(
            plan=plan,
            model=plan.model,
            num_parameters=num_parameters(plan.model),
            largest_block=largest_block(plan.model),
            precision=state_precision(plan),
            global_sequences=plan.mathematics.global_sequences,
            microbatch_sequences=plan.layout.microbatch_sequences,
            positions=plan.mathematics.sequence_length,
            memory=cluster.device.memory_bytes,
            nodes=cluster.nodes,
            devices_per_node=cluster.devices_per_node,
            domain=fast_domain(cluster),
            links=cluster.links,
        )

    def inputs(self, split: GuideSplit, recompute: RecomputePolicy | None) -> CostInputs:
        """Return what the formulas read of a split; recompute is the run's own where it is None."""
        return cost_inputs_from_split(self.plan, split, recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideAnswer:
    """Say yes or no, and the numbers why."""

    yes: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideQuestion:
    """Ask one thing of a situation."""

    text: str
    ask: Callable[[Situation], GuideAnswer]


def _fits_split(
    situation: Situation, split: GuideSplit, recompute: RecomputePolicy | None = None
) -> GuideAnswer:
    """Return whether the fullest rank of a split fits its device."""
    held = situation.held(split, recompute)
    parts = [f"{held.states / GIB:,.1f} GiB of states"]
    parts += [f"{held.gathered / GIB:,.1f} of gathered units"] if held.gathered else []
    parts.append(f"{held.activations / GIB:,.1f} of activations")
    parts.append(f"{held.rest / GIB:,.1f} else")
    return GuideAnswer(
        yes=held.total <= situation.memory,
        why=f"{' + '.join(parts)} = {situation.against(held.total)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroFitQuestion:
    """Ask whether a model fits, cut over data ranks at a ZeRO stage."""

    stage: ZeroStage
    recompute: RecomputePolicy | None = None

    @property
    def text(self) -> str:
        """Return the question."""
        what = ("optimizer state", "gradients too", "parameters too")[self.stage - 1]
        more = ", every block recomputed" if self.recompute == "full" else ""
        return f"With {what} cut over N data ranks{more}, does it fit?"

    def ask(self, situation: Situation) -> GuideAnswer:
        """Return the answer, over as many data ranks as the batch has work for."""
        ranks = situation.most_data_ranks()
        split = GuideSplit(dp=ranks, zero=self.stage)
        found = _fits_split(situation, split, self.recompute)
        return GuideAnswer(yes=found.yes, why=f"N = {ranks}: {found.why}")


def _block(situation: Situation) -> GuideAnswer:
    states = model_states(situation.largest_block, 0, 1, situation.precision).total
    kept = kept_of_block(situation.inputs(GuideSplit(), "none"), situation.model)
    return GuideAnswer(
        yes=states + kept <= situation.memory,
        why=f"{states / GIB:,.1f} GiB of states + {kept / GIB:,.1f} of activations = "
        f"{situation.against(states + kept)}",
    )


def largest_block(shape: ModelShape) -> int:
    """Return the weights of the largest block, all of its experts included."""
    layers = Counter[int]()
    for spec in parameters(shape):
        if spec.layer is not None:
            layers[spec.layer] += spec.numel
    return max(layers.values())


def _node_and_zero(situation: Situation) -> GuideAnswer:
    tp = situation.tensor_ranks
    ranks = situation.most_data_ranks(tp)
    found = _fits_split(situation, GuideSplit(tp=tp, dp=ranks, zero=3))
    return GuideAnswer(yes=found.yes, why=f"tp {tp}, N = {ranks}: {found.why}")


def _fast_inside(situation: Situation) -> GuideAnswer:
    link = situation.inside
    if link is None:
        return GuideAnswer(yes=False, why="one device a node")
    return GuideAnswer(
        yes=link.bandwidth >= _FAST_LINK,
        why=f"{link.name}: {link.bandwidth / GB:,.0f} GB/s one way; {_FAST_LINK / GB:.0f} asked",
    )


def _many_nodes(situation: Situation) -> GuideAnswer:
    count, nodes = situation.num_domains, situation.nodes
    if count == nodes:
        return GuideAnswer(yes=nodes > 1, why=f"{nodes} node{'s' * (nodes > 1)}")
    joined = f"{nodes} nodes, joined by the links of a node in {count} x {situation.domain} devices"
    return GuideAnswer(yes=count > 1, why=joined)


def _deep(situation: Situation) -> GuideAnswer:
    stages = max(2, situation.num_domains)
    layers = situation.model.layers
    enough = situation.num_devices >= 2 and layers >= _BLOCKS_A_STAGE * stages
    return GuideAnswer(
        yes=enough,
        why=f"{layers} blocks over {stages} stages, {_BLOCKS_A_STAGE} a stage asked; "
        f"{situation.num_devices} devices",
    )


def _tiered(situation: Situation) -> GuideAnswer:
    inside, between = situation.inside, situation.between
    if inside is None or between is None:
        return GuideAnswer(yes=False, why="links of one kind")
    ratio = inside.bandwidth / between.bandwidth
    return GuideAnswer(
        yes=inside.bandwidth >= _FAST_LINK and ratio > 1,
        why=f"{inside.bandwidth / GB:,.0f} GB/s in a node, {between.bandwidth / GB:,.0f} between: "
        f"{ratio:.0f}x",
    )


def _sequence(situation: Situation) -> GuideAnswer:
    """Ask whether the activations of a microbatch fit beside nothing else, cut by tp of a node."""
    tp = situation.tensor_ranks if situation.inside is not None else 1
    tp = tp if situation.model.heads % tp == 0 else 1
    kept = situation.held(GuideSplit(tp=tp)).activations
    return GuideAnswer(
        yes=kept <= situation.memory,
        why=f"{situation.positions:,} positions, tp {tp}: {situation.against(kept)} of activations",
    )


def _experts(situation: Situation) -> GuideAnswer:
    experts = situation.model.experts
    if experts is None:
        return GuideAnswer(yes=False, why="dense")
    return GuideAnswer(yes=True, why=f"{experts.num_experts} experts, {experts.top_k} a token")


FITS_ONE = GuideQuestion(
    text="Does the model, with gradients and optimizer state, fit one device?",
    ask=lambda situation: _fits_split(situation, GuideSplit()),
)
ZERO_1_FITS, ZERO_2_FITS = ZeroFitQuestion(stage=1), ZeroFitQuestion(stage=2)
ZERO_3_FITS = ZeroFitQuestion(stage=3)
ZERO_3_FITS_RECOMPUTED = ZeroFitQuestion(stage=3, recompute="full")
BLOCK_FITS = GuideQuestion(text="Does one block fit one device?", ask=_block)
NODE_FITS = GuideQuestion(
    text="Does it fit, cut by tensor parallelism over one node?",
    ask=lambda situation: _fits_split(situation, GuideSplit(tp=situation.tensor_ranks)),
)
NODE_AND_ZERO_FIT = GuideQuestion(
    text="Does it fit with tensor parallelism over a whole node, and ZeRO 3 over the rest?",
    ask=_node_and_zero,
)
FAST_INSIDE = GuideQuestion(text="Are the links inside of a node fast?", ask=_fast_inside)
MANY_NODES = GuideQuestion(text="Are there several nodes?", ask=_many_nodes)
DEEP = GuideQuestion(text="Is the model deep: blocks enough for stages?", ask=_deep)
TIERED = GuideQuestion(text="Are links fast in a node and slower between nodes?", ask=_tiered)
SEQUENCE_FITS = GuideQuestion(text="Do the activations of one microbatch fit?", ask=_sequence)
HAS_EXPERTS = GuideQuestion(text="Is it a mixture of experts?", ask=_experts)
