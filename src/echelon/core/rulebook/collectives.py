# SPDX-License-Identifier: Apache-2.0
"""Rules about how ranks sum and gather."""

from echelon.core.rules import Rule

OWN_SUMS_NEED_GLOO = Rule(
    id="own-sums-need-gloo",
    why="""
    "ring", "tree", "halving-doubling" and "hierarchical" are made of messages between pairs of
    ranks, run by a thread of the host beside the one that trains. Over Gloo they replace its one
    ring of all ranks. NCCL runs on the device, and lays rings and trees over the machine by itself:
    there "backend" is the only choice, and what "auto" means.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_shard = 8
    [collectives]
    %s
    """,
    bad='algorithm = "ring"',
    fixed='algorithm = "backend"',
)

HALVING_NEEDS_POWER_OF_TWO = Rule(
    id="halving-needs-power-of-two",
    why="""
    Recursive halving pairs each rank with the one n/2 places away, then n/4, down to its neighbour:
    every group that sums gradients, slices of them or rows must have 2, 4, 8, ... ranks
    (Rabenseifner, 2004). A ring sends as few bytes for any number of ranks.
    """,
    example="""
    [mesh]
    dp_replicate = 3
    [batch]
    global_sequences = 6
    [collectives]
    %s
    """,
    bad='algorithm = "halving-doubling"',
    fixed='algorithm = "ring"',
)

HIERARCHY_NEEDS_EVEN_NODES = Rule(
    id="hierarchy-needs-even-nodes",
    why="""
    A hierarchical all-reduce scatters inside of each node, sums across nodes, and gathers inside;
    one that scatters or gathers slices does a part of that. Some group that sums gradients, slices
    of them or rows must have the same number of ranks, two or more, on each of two or more nodes.
    Inside of one node, or with one rank on each, there is nothing to divide.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [batch]
    global_sequences = 4
    [collectives]
    %s
    """,
    bad='algorithm = "hierarchical"',
    fixed='algorithm = "ring"',
)

COLLECTIVE_ARGUMENT = Rule(
    id="collective-argument",
    why="""
    A function of `echelon.collectives` was given what its group cannot do: rows that the ranks do
    not divide, counts of rows that do not add up to those of the tensor, a place that no rank has,
    an algorithm that does not fit. It is refused before anything is sent, for the other ranks would
    wait for it.
    """,
    bad="ec.collectives.reduce_scatter(torch.ones(6, 2))           # over 4 ranks: 6 % 4 = 2",
    fixed="ec.collectives.reduce_scatter(torch.ones(8, 2))           # over 4 ranks: 2 rows each",
)
