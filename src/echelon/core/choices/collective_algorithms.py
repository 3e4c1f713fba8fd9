# SPDX-License-Identifier: Apache-2.0
"""The ways in which ranks sum a tensor, scatter a sum and gather slices, each as one record.

n is the size of a group, l how many of its members each node holds, k = n / l its nodes, M the
bytes that are summed. Which one a group takes follows from its ranks alone, so every member, the
byte formulas and the rules come to the same answer. A tree sums and scatters nothing: where
slices are summed or gathered, pairs of ranks exchange them, as with the backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from echelon.core.choices.registry import Registry

AlgorithmNeed = Literal["nothing", "power of two", "even nodes"]
"""What a group must be: any, of a power of two ranks, or as many ranks on each of several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveAlgorithmRecord:
    """Say what one way to sum splits, sends, and needs, and name what makes its steps."""

    name: str
    """What `collectives.algorithm` takes."""
    split: str
    """What is split."""
    sent: str
    """What is sent, and when."""
    bytes: str
    """Bytes that a rank sends for an all-reduce; half of them for either of the other two."""
    divides: str
    """What must divide."""
    source: str
    """Where it is from."""
    need: AlgorithmNeed = "nothing"
    """What a group must be."""
    runner: str = ""
    """"module:function" that makes the steps of one member; "" where the backend sums."""
    scatter_runner: str = ""
    """The same of a reduce-scatter; "" where pairs of ranks exchange slices."""
    gather_runner: str = ""
    """The same of an all-gather; there is one where there is a reduce-scatter."""
    tool_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its names in other tools, by the names of the tools."""

    @property
    def scatters(self) -> bool:
        """Return whether slices are summed and gathered by it, too."""
        return bool(self.scatter_runner)


BACKEND = "backend"
"""What the backend (Gloo, NCCL) does by itself."""
HIERARCHICAL = "hierarchical"
_RUNNERS = "echelon.parallel.transport.algorithms"

COLLECTIVE_ALGORITHMS = Registry(
    "collective algorithm",
    (
        CollectiveAlgorithmRecord(
            name=BACKEND,
            split="as the backend does",
            sent="by Gloo around a ring of all ranks; by NCCL around rings or along trees that it "
            "lays over the machine",
            bytes="2 (n-1)/n M",
            divides="nothing",
            source="Gloo, allreduce.cc; NVIDIA, NCCL",
        ),
        CollectiveAlgorithmRecord(
            name="ring",
            split="the tensor, into n chunks",
            sent="n-1 steps to the next rank, each adding a chunk; n-1 steps more with the sums",
            bytes="2 (n-1)/n M; of odd sizes 2 M less two chunks",
            divides="nothing",
            source="Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009",
            runner=f"{_RUNNERS}:ring_steps",
            scatter_runner=f"{_RUNNERS}:ring_scatter_steps",
            gather_runner=f"{_RUNNERS}:ring_gather_steps",
        ),
        CollectiveAlgorithmRecord(
            name="tree",
            split="nothing",
            sent="log2 n steps to the parent of a binomial tree, log2 n steps back",
            bytes="M up, and M down to each child",
            divides="nothing",
            source="Thakur et al., Optimization of Collective Communication, 2005",
            runner=f"{_RUNNERS}:tree_steps",
        ),
        CollectiveAlgorithmRecord(
            name="halving-doubling",
            split="the tensor, in halves of halves",
            sent="log2 n exchanges of halves, far pairs first; log2 n exchanges back",
            bytes="2 (n-1)/n M",
            divides="n is a power of two",
            source="Rabenseifner, Optimization of Collective Reduction Operations, 2004",
            need="power of two",
            runner=f"{_RUNNERS}:halving_doubling_steps",
            scatter_runner=f"{_RUNNERS}:halving_steps",
            gather_runner=f"{_RUNNERS}:doubling_steps",
        ),
        CollectiveAlgorithmRecord(
            name=HIERARCHICAL,
            split="the tensor, into l parts in a node, each into k across nodes",
            sent="reduce-scatter inside of a node, ring all-reduce across nodes, all-gather inside",
            bytes="2 (l-1)/l M inside of nodes, 2 (k-1)/k M/l across them",
            divides="each of k > 1 nodes holds l > 1 ranks of the group",
            source="Thakur et al., 2005; Patarasuk and Yuan, 2009, on each level",
            need="even nodes",
            runner=f"{_RUNNERS}:hierarchical_steps",
            scatter_runner=f"{_RUNNERS}:hierarchical_scatter_steps",
            gather_runner=f"{_RUNNERS}:hierarchical_gather_steps",
        ),
    ),
)
"""The record of each algorithm, by the name that `collectives.algorithm` takes."""


def algorithm_index(name: str) -> int:
    """Return the number of an algorithm: its place in the registry."""
    return list(COLLECTIVE_ALGORITHMS).index(name)


def members_per_node(ranks: Sequence[int], devices_per_node: int) -> int:
    """Return l: how many of `ranks` each node holds; 0 where nodes hold different numbers."""
    counts = set(Counter(rank // devices_per_node for rank in ranks).values())
    return counts.pop() if len(counts) == 1 else 0


def fits_group(algorithm: str, ranks: Sequence[int], devices_per_node: int) -> bool:
    """Return whether a group of `ranks` is what an algorithm needs."""
    need, size = COLLECTIVE_ALGORITHMS[algorithm].need, len(ranks)
    if need == "power of two":
        return size & (size - 1) == 0
    return need == "nothing" or 1 < members_per_node(ranks, devices_per_node) < size


def algorithm_of_group(algorithm: str, ranks: Sequence[int], devices_per_node: int) -> str:
    """Return what a group takes where the plan says `algorithm`.

    A hierarchy is for groups that have one: those inside of a node, or with one rank on each, are
    left to the backend.
    """
    if algorithm == HIERARCHICAL and not fits_group(algorithm, ranks, devices_per_node):
        return BACKEND
    return algorithm
