# SPDX-License-Identifier: Apache-2.0
"""The decision trees of published guides, as data, and the way of a situation through one.

A branch changes the strategy and leads on, so a tree whose leaves each name a strategy and a list
of steps that each add an axis are the same type. Nodes may be reached from several others.

Of three guides (`handbook/errata/claims.py`) two start with data parallelism where it fits, one
with ZeRO 3 and, two sentences on, with the cheapest communication (llm-training-71, between-02):
the tree "cheapest" is what the bytes say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from echelon.handbook.guides.situation import (
    BLOCK_FITS,
    DEEP,
    FAST_INSIDE,
    FITS_ONE,
    HAS_EXPERTS,
    MANY_NODES,
    NODE_AND_ZERO_FIT,
    NODE_FITS,
    SEQUENCE_FITS,
    TIERED,
    ZERO_1_FITS,
    ZERO_2_FITS,
    ZERO_3_FITS,
    ZERO_3_FITS_RECOMPUTED,
    GuideAnswer,
    GuideQuestion,
    Situation,
    ZeroFitQuestion,
)
from echelon.handbook.guides.strategy import FREE, SEVERAL, DegreeRange, Strategy


@dataclass(frozen=True, slots=True)
class TreeBranch:
    """Say where an answer leads: `to` the id of a node, or "" for the end.

    `strategy` is the strategy from here on; `add` are axes that the one so far gets beside.
    """

    strategy: Strategy | None = None
    to: str = ""
    add: Mapping[str, DegreeRange] | None = None

    def after(self, strategy: Strategy) -> Strategy:
        """Return the strategy behind this branch."""
        strategy = self.strategy or strategy
        if not self.add:
            return strategy
        name = " + ".join([strategy.name, *(axis.upper() for axis in self.add)])
        return replace(strategy, name=name, **self.add)


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Hold a question, and the branches of its two answers."""

    id: str
    question: GuideQuestion | ZeroFitQuestion
    yes: TreeBranch
    no: TreeBranch


TreeSteps: TypeAlias = tuple[tuple[TreeNode, GuideAnswer], ...]
"""The questions that were asked on the way through a tree, each with its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTree:
    """Hold a guide's way to a strategy: `start` is what it begins with, `nodes[0]` asked first.

    `source` names the guide, `ours` what it leaves open and we decided.
    """

    id: str
    source: str
    title: str
    ours: str
    start: Strategy
    nodes: tuple[TreeNode, ...]

    def walk(self, situation: Situation) -> tuple[TreeSteps, Strategy]:
        """Return the way of a situation through the tree, and the strategy at its end."""
        nodes = {node.id: node for node in self.nodes}
        strategy, name = self.start, self.nodes[0].id
        steps: list[tuple[TreeNode, GuideAnswer]] = []
        # No way comes to a node twice.
        for _ in self.nodes:
            node = nodes[name]
            answer = node.question.ask(situation)
            steps.append((node, answer))
            branch = node.yes if answer.yes else node.no
            strategy, name = branch.after(strategy), branch.to
            if not name:
                break
        return tuple(steps), strategy


_DDP = Strategy(name="data parallel")
_ZERO_1 = Strategy(name="ZeRO 1", zero=(1,))
_ZERO_2 = Strategy(name="ZeRO 2", zero=(2,))
_ZERO_3 = Strategy(name="ZeRO 3 / FSDP", zero=(3,))
_ZERO_3_RECOMPUTED = Strategy(name="ZeRO 3, recomputed", zero=(3,), recompute="full")
_TENSOR = Strategy(name="tensor parallel in a node", tp=SEVERAL)
_PIPELINE = Strategy(name="pipeline parallel", pp=SEVERAL)
_PIPELINE_OVER_NODES = Strategy(name="pipeline over nodes, tensor inside", tp=FREE, pp=SEVERAL)
_HYBRID = Strategy(name="tensor x pipeline x data", tp=SEVERAL, pp=FREE)
_HYBRID_ZERO_1 = Strategy(
    name="tensor x pipeline x ZeRO 1", zero=(1,), tp=SEVERAL, pp=FREE, ep=FREE
)
_MORE_DEVICES = Strategy(name="more devices, or offload", zero=(3,), tp=FREE, pp=FREE)

_DISTRIBUTED = DecisionTree(
    id="distributed",
    source="distributed, decision tree",
    title="Fits one device, or which axis first",
    ours="it asks whether the model fits one device and names four ends; the questions between "
    "them are read from what it says of each end",
    start=_DDP,
    nodes=(
        TreeNode("fits", FITS_ONE, yes=TreeBranch(_DDP), no=TreeBranch(to="fast")),
        TreeNode("fast", FAST_INSIDE, yes=TreeBranch(to="node"), no=TreeBranch(_ZERO_3)),
        TreeNode("node", NODE_FITS, yes=TreeBranch(_TENSOR), no=TreeBranch(to="nodes")),
        TreeNode("nodes", MANY_NODES, yes=TreeBranch(_PIPELINE_OVER_NODES), no=TreeBranch(_ZERO_3)),
    ),
)

_LLM_TRAINING = DecisionTree(
    id="llm-training",
    source="llm-training, section 10",
    title="ZeRO 3 first, then axes one by one",
    ours="'exceeds memory' is read as: activations of one microbatch, cut over a node, do not fit "
    "(so what fits over a node needs no such question)",
    start=_ZERO_3,
    nodes=(
        TreeNode(
            "block",
            BLOCK_FITS,
            yes=TreeBranch(to="sequence"),
            no=TreeBranch(to="node", add={"tp": SEVERAL}),
        ),
        TreeNode(
            "node",
            NODE_AND_ZERO_FIT,
            yes=TreeBranch(to="experts"),
            no=TreeBranch(to="sequence", add={"pp": SEVERAL}),
        ),
        TreeNode(
            "sequence",
            SEQUENCE_FITS,
            yes=TreeBranch(to="experts"),
            no=TreeBranch(to="experts", add={"cp": SEVERAL}),
        ),
        TreeNode("experts", HAS_EXPERTS, yes=TreeBranch(add={"ep": SEVERAL}), no=TreeBranch()),
    ),
)

_SCALING = DecisionTree(
    id="scaling",
    source="scaling, conclusion",
    title="Compute or memory, then topology",
    ours="its three questions for models that do not fit are asked in the order of what an answer "
    "rules out: one block, then shards, then depth; the topology where axes are combined",
    start=_DDP,
    nodes=(
        TreeNode("fits", FITS_ONE, yes=TreeBranch(_DDP), no=TreeBranch(to="block")),
        TreeNode(
            "block",
            BLOCK_FITS,
            yes=TreeBranch(to="shards"),
            no=TreeBranch(_TENSOR, to="tiers-block"),
        ),
        TreeNode("tiers-block", TIERED, yes=TreeBranch(_HYBRID), no=TreeBranch()),
        TreeNode("shards", ZERO_3_FITS, yes=TreeBranch(_ZERO_3), no=TreeBranch(to="deep")),
        TreeNode(
            "deep", DEEP, yes=TreeBranch(_PIPELINE, to="tiers-deep"), no=TreeBranch(_MORE_DEVICES)
        ),
        TreeNode("tiers-deep", TIERED, yes=TreeBranch(_HYBRID), no=TreeBranch()),
    ),
)

_CHEAPEST = DecisionTree(
    id="cheapest",
    source="llm-training-71 and between-02, corrected",
    title="The cheapest communication that fits",
    ours="stages 0 to 2 send 2 psi, stage 3 sends 3 psi, tensor ranks send activations of every "
    "block: the first that fits is taken (cost/bytes/model_sizes.py)",
    start=_DDP,
    nodes=(
        TreeNode("ddp", FITS_ONE, yes=TreeBranch(_DDP), no=TreeBranch(to="zero-1")),
        TreeNode("zero-1", ZERO_1_FITS, yes=TreeBranch(_ZERO_1), no=TreeBranch(to="zero-2")),
        TreeNode("zero-2", ZERO_2_FITS, yes=TreeBranch(_ZERO_2), no=TreeBranch(to="zero-3")),
        TreeNode("zero-3", ZERO_3_FITS, yes=TreeBranch(_ZERO_3), no=TreeBranch(to="recompute")),
        TreeNode(
            "recompute",
            ZERO_3_FITS_RECOMPUTED,
            yes=TreeBranch(_ZERO_3_RECOMPUTED),
            no=TreeBranch(to="fast"),
        ),
        TreeNode("fast", FAST_INSIDE, yes=TreeBranch(_HYBRID_ZERO_1), no=TreeBranch(_MORE_DEVICES)),
    ),
)

TREES = (_DISTRIBUTED, _LLM_TRAINING, _SCALING, _CHEAPEST)
