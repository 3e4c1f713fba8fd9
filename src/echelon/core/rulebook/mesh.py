# SPDX-License-Identifier: Apache-2.0
"""Rules about the mesh: degrees, world size, what a degree divides."""

from echelon.core.rules import Rule

DEGREE_AT_LEAST_ONE = Rule(
    id="degree-at-least-one",
    why="""
    A degree is the number of ranks along one axis of the mesh. One rank is the least; an axis that
    you do not want has degree 1. There is no "as many as are left".
    """,
    example="""
    [mesh]
    %s
    """,
    bad="tp = 0",
    fixed="tp = 1",
)

WORLD_SIZE_IS_PRODUCT = Rule(
    id="world-size-is-product",
    why="""
    Ranks form a grid, so their number is the product pp x dp_replicate x dp_shard x cp x tp. A rank
    more would have no place, a rank less would leave a group waiting for ever.
    """,
    bad="torchrun --nproc-per-node 6 ... # mesh: pp = 2, dp_replicate = 2, tp = 2",
    fixed="torchrun --nproc-per-node 8 ... # 2 x 2 x 2 = 8",
)

FITS_CLUSTER = Rule(
    id="fits-cluster",
    why="Every rank needs a device of its own. Memory is another matter: this rule counts devices.",
    bad="""
    [cluster]
    preset = "8xh100"
    [mesh]
    tp = 8
    dp_replicate = 2            # 16 ranks, 8 devices
    """,
    fixed="""
    [cluster]
    preset = "16xh100"
    [mesh]
    tp = 8
    dp_replicate = 2
    """,
)

TP_DIVIDES_HEADS = Rule(
    id="tp-divides-heads",
    why="""
    Tensor parallelism gives each rank whole attention heads (Megatron-LM, section 3), so tp must
    divide their number. Hidden itself is never split, and the vocabulary is padded and masked.
    """,
    example="""
    [model]
    heads = 6
    [mesh]
    %s
    """,
    bad="tp = 4",
    fixed="tp = 3",
)

TP_DIVIDES_KV_HEADS = Rule(
    id="tp-divides-kv-heads",
    why="""
    Grouped-query attention shares a key/value head among several query heads. Each tensor rank
    holds whole key/value heads beside the queries that use them, so tp must divide their number.
    """,
    example="""
    [model]
    heads = 32
    kv_heads = 8
    [mesh]
    %s
    """,
    bad="tp = 16",
    fixed="tp = 8",
)

TP_DIVIDES_FFN = Rule(
    id="tp-divides-ffn",
    why="""
    The inner width of the MLP is cut over the tensor ranks: columns of the first matrix, rows of
    the second (Megatron-LM, section 3). Each rank takes an equal part.
    """,
    example="""
    [model]
    %s
    [mesh]
    tp = 4
    """,
    bad="ffn = 350",
    fixed="ffn = 352",
)

SEQUENCE_PARALLEL_DIVIDES_SEQUENCE = Rule(
    id="sequence-parallel-divides-sequence",
    why="""
    Sequence parallelism cuts a sequence into one equal piece per tensor rank between the matrices
    (Korthikanti et al. 2022, section 4.2), so tp must divide sequence_length. With context
    parallelism it cuts the part of a context rank, so cp x tp must divide it.
    """,
    example="""
    [mesh]
    tp = 4
    sequence_parallel = true
    [batch]
    %s
    """,
    bad="sequence_length = 130",
    fixed="sequence_length = 128",
)

SYMMETRIC_MEMORY_REACHES_RANKS = Rule(
    id="symmetric-memory-reaches-ranks",
    why="""
    With tp_overlap = "symmetric-memory" a GPU reads the rows of the other tensor ranks out of their
    memory while it multiplies (PyTorch's fused_all_gather_matmul and fused_matmul_reduce_scatter).
    That takes GPUs, and links of one node or of one NVLink domain among all ranks of a group.
    "ring" sends the same bytes as messages, over any link and between CPU ranks.
    """,
    example="""
    [cluster]
    preset = "laptop"
    [mesh]
    tp = 2
    sequence_parallel = true
    %s
    """,
    bad='tp_overlap = "symmetric-memory"',
    fixed='tp_overlap = "ring"',
)

WHOLE_NODES = Rule(
    id="whole-nodes",
    why="""
    A cluster named COUNTxDEVICE is part of one node, or whole nodes. Other shapes are written down
    in a file: [cluster] file = "cluster.toml".
    """,
    example="""
    [cluster]
    %s
    """,
    bad='preset = "12xh100"          # 8 to a node',
    fixed='preset = "16xh100"',
)

LINKS_JOIN_CLUSTER = Rule(
    id="links-join-cluster",
    why="""
    The tiers of links are listed from the fastest, within a node, to the slowest; the last joins
    all devices, or some ranks could not reach one another.
    """,
    example="""
    # cluster.toml
    nodes = 2
    devices_per_node = 8
    [[links]]
    %s
    """,
    bad="degree = 8",
    fixed="""
    degree = 8
    [[links]]
    degree = "all"
    """,
)
