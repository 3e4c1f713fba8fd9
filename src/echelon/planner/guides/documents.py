"""The decision trees of three published guides, and the corrected rule where to start.

Guides are named by the numbers of `planner/errata`: 002 is a tutorial on data, tensor and pipeline
parallelism, 003 one on ten kinds of parallelism, 004 a report on data parallelism. Two of them
start with data parallelism where it fits, one with ZeRO 3 and, two sentences on, with the cheapest
communication (003-71, X-02): the tree "cheapest" is what the bytes say.
"""

from __future__ import annotations

from echelon.planner.guides.questions import (
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
)
from echelon.planner.guides.strategy import FREE, SEVERAL, Strategy
from echelon.planner.guides.trees import Branch, Node, Tree

DDP = Strategy(name="data parallel")
ZERO_1 = Strategy(name="ZeRO 1", zero=(1,))
ZERO_2 = Strategy(name="ZeRO 2", zero=(2,))
ZERO_3 = Strategy(name="ZeRO 3 / FSDP", zero=(3,))
ZERO_3_RECOMPUTED = Strategy(name="ZeRO 3, recomputed", zero=(3,), recompute="full")
TENSOR = Strategy(name="tensor parallel in a node", tp=SEVERAL)
PIPELINE = Strategy(name="pipeline parallel", pp=SEVERAL)
PIPELINE_OVER_NODES = Strategy(name="pipeline over nodes, tensor inside", tp=FREE, pp=SEVERAL)
HYBRID = Strategy(name="tensor x pipeline x data", tp=SEVERAL, pp=FREE)
HYBRID_ZERO_1 = Strategy(name="tensor x pipeline x ZeRO 1", zero=(1,), tp=SEVERAL, pp=FREE, ep=FREE)
MORE_DEVICES = Strategy(name="more devices, or offload", zero=(3,), tp=FREE, pp=FREE)

TREE_002 = Tree(
    id="guide-002",
    source="002, decision tree",
    title="Fits one device, or which axis first",
    ours="it asks whether the model fits one device and names four ends; the questions between "
    "them are read from what it says of each end",
    start=DDP,
    nodes=(
        Node(id="fits", question=FITS_ONE, yes=Branch(becomes=DDP), no=Branch(to="fast")),
        Node(id="fast", question=FAST_INSIDE, yes=Branch(to="node"), no=Branch(becomes=ZERO_3)),
        Node(id="node", question=NODE_FITS, yes=Branch(becomes=TENSOR), no=Branch(to="nodes")),
        Node(
            id="nodes",
            question=MANY_NODES,
            yes=Branch(becomes=PIPELINE_OVER_NODES),
            no=Branch(becomes=ZERO_3),
        ),
    ),
)

TREE_003 = Tree(
    id="guide-003",
    source="003, section 10",
    title="ZeRO 3 first, then axes one by one",
    ours="'exceeds memory' is read as: activations of one microbatch, cut over a node, do not fit "
    "(so what fits over a node needs no such question)",
    start=ZERO_3,
    nodes=(
        Node(
            id="block",
            question=BLOCK_FITS,
            yes=Branch(to="sequence"),
            no=Branch(to="node", adds={"tp": SEVERAL}),
        ),
        Node(
            id="node",
            question=NODE_AND_ZERO_FIT,
            yes=Branch(to="experts"),
            no=Branch(to="sequence", adds={"pp": SEVERAL}),
        ),
        Node(
            id="sequence",
            question=SEQUENCE_FITS,
            yes=Branch(to="experts"),
            no=Branch(to="experts", adds={"cp": SEVERAL}),
        ),
        Node(id="experts", question=HAS_EXPERTS, yes=Branch(adds={"ep": SEVERAL}), no=Branch()),
    ),
)

TREE_004 = Tree(
    id="guide-004",
    source="004, conclusion",
    title="Compute or memory, then topology",
    ours="its three questions for models that do not fit are asked in the order of what an answer "
    "rules out: one block, then shards, then depth; the topology where axes are combined",
    start=DDP,
    nodes=(
        Node(id="fits", question=FITS_ONE, yes=Branch(becomes=DDP), no=Branch(to="block")),
        Node(
            id="block",
            question=BLOCK_FITS,
            yes=Branch(to="shards"),
            no=Branch(to="tiers-block", becomes=TENSOR),
        ),
        Node(id="tiers-block", question=TIERED, yes=Branch(becomes=HYBRID), no=Branch()),
        Node(id="shards", question=ZERO_3_FITS, yes=Branch(becomes=ZERO_3), no=Branch(to="deep")),
        Node(
            id="deep",
            question=DEEP,
            yes=Branch(to="tiers-deep", becomes=PIPELINE),
            no=Branch(becomes=MORE_DEVICES),
        ),
        Node(id="tiers-deep", question=TIERED, yes=Branch(becomes=HYBRID), no=Branch()),
    ),
)

CHEAPEST = Tree(
    id="cheapest",
    source="003-71 and X-02, corrected",
    title="The cheapest communication that fits",
    ours="stages 0 to 2 send 2 psi, stage 3 sends 3 psi, tensor ranks send activations of every "
    "block: the first that fits is taken (cost/model_states.py)",
    start=DDP,
    nodes=(
        Node(id="ddp", question=FITS_ONE, yes=Branch(becomes=DDP), no=Branch(to="zero-1")),
        Node(id="zero-1", question=ZERO_1_FITS, yes=Branch(becomes=ZERO_1), no=Branch(to="zero-2")),
        Node(id="zero-2", question=ZERO_2_FITS, yes=Branch(becomes=ZERO_2), no=Branch(to="zero-3")),
        Node(
            id="zero-3",
            question=ZERO_3_FITS,
            yes=Branch(becomes=ZERO_3),
            no=Branch(to="recompute"),
        ),
        Node(
            id="recompute",
            question=ZERO_3_FITS_RECOMPUTED,
            yes=Branch(becomes=ZERO_3_RECOMPUTED),
            no=Branch(to="fast"),
        ),
        Node(
            id="fast",
            question=FAST_INSIDE,
            yes=Branch(becomes=HYBRID_ZERO_1),
            no=Branch(becomes=MORE_DEVICES),
        ),
    ),
)

TREES = (TREE_002, TREE_003, TREE_004, CHEAPEST)
