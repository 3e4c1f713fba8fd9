"""The questions of the guides: functions of a situation, answered with the numbers they rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import RecomputePolicy, ZeroStage
from echelon.cost.model_states import model_states
from echelon.planner.guides.memory import Split, block_activations
from echelon.planner.guides.situation import GB, Situation

FAST_LINK = 100e9
"""Bytes/s in one direction from which a link counts as NVLink-like: PCIe 5.0 x16 has 64e9."""

BLOCKS_A_STAGE = 2
"""A model is deep where each node could be a stage of at least so many blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Say yes or no, and the numbers why."""

    yes: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Ask one thing of a situation."""

    text: str
    ask: Callable[[Situation], Answer]


def fits_split(
    situation: Situation, split: Split, recompute: RecomputePolicy | None = None
) -> Answer:
    """Return whether the fullest rank of a split fits its device."""
    held = situation.held(split, recompute)
    parts = [f"{held.states / GB:,.1f} GB of states"]
    parts += [f"{held.gathered / GB:,.1f} of gathered units"] if held.gathered else []
    parts.append(f"{held.activations / GB:,.1f} of activations")
    parts.append(f"{held.rest / GB:,.1f} else")
    return Answer(
        yes=held.total <= situation.memory,
        why=f"{' + '.join(parts)} = {situation.against(held.total)}",
    )


def _zero(stage: ZeroStage, recompute: RecomputePolicy | None = None) -> Question:
    def ask(situation: Situation) -> Answer:
        ranks = situation.most_data_ranks()
        found = fits_split(situation, Split(dp=ranks, zero=stage), recompute)
        return Answer(yes=found.yes, why=f"N = {ranks}: {found.why}")

    what = ("optimizer state", "gradients too", "parameters too")[stage - 1]
    more = ", every block recomputed" if recompute == "full" else ""
    return Question(text=f"With {what} cut over N data ranks{more}, does it fit?", ask=ask)


def _block(situation: Situation) -> Answer:
    states = model_states(_largest_block(situation.model), 0, 1, situation.precision).total
    kept = block_activations(situation.plan)
    return Answer(
        yes=states + kept <= situation.memory,
        why=f"{states / GB:,.1f} GB of states + {kept / GB:,.1f} of activations = "
        f"{situation.against(states + kept)}",
    )


def _largest_block(shape: ModelShape) -> int:
    """Return the weights of the largest block, all of its experts included."""
    layers = Counter[int]()
    for spec in parameters(shape):
        if spec.layer is not None:
            layers[spec.layer] += spec.numel
    return max(layers.values())


def _node(situation: Situation) -> Answer:
    tp = situation.tensor_ranks
    return fits_split(situation, Split(tp=tp))


def _node_and_zero(situation: Situation) -> Answer:
    tp = situation.tensor_ranks
    ranks = situation.most_data_ranks(tp)
    found = fits_split(situation, Split(tp=tp, dp=ranks, zero=3))
    return Answer(yes=found.yes, why=f"tp {tp}, N = {ranks}: {found.why}")


def _fast_inside(situation: Situation) -> Answer:
    link = situation.inside
    if link is None:
        return Answer(yes=False, why="one device a node")
    return Answer(
        yes=link.bandwidth >= FAST_LINK,
        why=f"{link.name}: {link.bandwidth / GB:,.0f} GB/s one way; {FAST_LINK / GB:.0f} asked",
    )


def _many_nodes(situation: Situation) -> Answer:
    count, nodes = situation.num_domains, situation.cluster.nodes
    if count == nodes:
        return Answer(yes=nodes > 1, why=f"{nodes} node{'s' * (nodes > 1)}")
    joined = f"{nodes} nodes, joined by the links of a node in {count} x {situation.domain} devices"
    return Answer(yes=count > 1, why=joined)


def _deep(situation: Situation) -> Answer:
    stages = max(2, situation.num_domains)
    layers = situation.model.layers
    enough = situation.num_devices >= 2 and layers >= BLOCKS_A_STAGE * stages
    return Answer(
        yes=enough,
        why=f"{layers} blocks over {stages} stages, {BLOCKS_A_STAGE} a stage asked; "
        f"{situation.num_devices} devices",
    )


def _tiered(situation: Situation) -> Answer:
    inside, between = situation.inside, situation.between
    if inside is None or between is None:
        return Answer(yes=False, why="links of one kind")
    ratio = inside.bandwidth / between.bandwidth
    return Answer(
        yes=inside.bandwidth >= FAST_LINK and ratio > 1,
        why=f"{inside.bandwidth / GB:,.0f} GB/s in a node, {between.bandwidth / GB:,.0f} between: "
        f"{ratio:.0f}x",
    )


def _sequence(situation: Situation) -> Answer:
    """Ask whether the activations of a microbatch fit beside nothing else, cut by tp of a node."""
    inside = situation.inside
    tp = situation.tensor_ranks if inside is not None else 1
    tp = tp if situation.model.heads % tp == 0 else 1
    kept = situation.held(Split(tp=tp)).activations
    return Answer(
        yes=kept <= situation.memory,
        why=f"{situation.positions:,} positions, tp {tp}: {situation.against(kept)} of activations",
    )


def _experts(situation: Situation) -> Answer:
    experts = situation.model.experts
    if experts is None:
        return Answer(yes=False, why="dense")
    return Answer(yes=True, why=f"{experts.num_experts} experts, {experts.top_k} a token")


FITS_ONE = Question(
    text="Does the model, with gradients and optimizer state, fit one device?",
    ask=lambda situation: fits_split(situation, Split()),
)
ZERO_1_FITS, ZERO_2_FITS, ZERO_3_FITS = _zero(1), _zero(2), _zero(3)
ZERO_3_FITS_RECOMPUTED = _zero(3, "full")
BLOCK_FITS = Question(text="Does one block fit one device?", ask=_block)
NODE_FITS = Question(text="Does it fit, cut by tensor parallelism over one node?", ask=_node)
NODE_AND_ZERO_FIT = Question(
    text="Does it fit with tensor parallelism over a whole node, and ZeRO 3 over the rest?",
    ask=_node_and_zero,
)
FAST_INSIDE = Question(text="Are the links inside of a node fast?", ask=_fast_inside)
MANY_NODES = Question(text="Are there several nodes?", ask=_many_nodes)
DEEP = Question(text="Is the model deep: blocks enough for stages?", ask=_deep)
TIERED = Question(text="Are links fast in a node and slower between nodes?", ask=_tiered)
SEQUENCE_FITS = Question(text="Do the activations of one microbatch fit?", ask=_sequence)
HAS_EXPERTS = Question(text="Is it a mixture of experts?", ask=_experts)
