# SPDX-License-Identifier: Apache-2.0
"""Rules about the mesh, and about the batch, sequences and collectives on its axes."""

from echelon.core.rules import Area, Rule

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


BATCH_AREA = Area("batch")
"""Batches and sequences."""

BATCH_DIVIDES = Rule(
    id="batch-divides",
    why="""
    A global batch is shared out evenly: global_sequences = microbatches x microbatch_sequences x
    the data-parallel degree. Nothing is dropped or padded to make it fit.
    """,
    example="""
    [mesh]
    dp_replicate = 4
    [batch]
    %s
    microbatch_sequences = 2
    """,
    bad="global_sequences = 30",
    fixed="global_sequences = 32",
)

SEQUENCE_FITS_POSITIONS = Rule(
    id="sequence-fits-positions",
    why="""
    A sequence may not be longer than the positions that the model has. Rotary positions go on:
    with a larger `model.max_positions` no weight changes, but weights that were trained on fewer
    positions know only those, and `model.rope_scaling` stretches them. Learned positions are rows
    of a table: with more of them the model has more parameters, which nobody has trained.
    `echelon plan MODEL --cluster ... --objective longest-sequence` finds the longest that fits.
    """,
    example="""
    [model]
    %s
    [batch]
    sequence_length = 2048
    """,
    bad='preset = "gpt2"             # 1024 positions',
    fixed="""
    preset = "gpt2"
    max_positions = 2048
    """,
)

LEARNING_RATE_FITS_STEPS = Rule(
    id="learning-rate-fits-steps",
    why="""
    The learning rate rises for warmup_steps and, with "wsd", falls for decay_steps; together they
    may not be longer than the run, or it would never reach its peak or its end.
    """,
    example="""
    [train]
    %s
    [optimizer]
    warmup_steps = 200
    """,
    bad="steps = 100",
    fixed="steps = 1000",
)

DECAY_FITS_NORM_OFFSET = Rule(
    id="decay-fits-norm-offset",
    why="""
    Weight decay pulls what is trained towards 0. Norms have what multiplies here, and files of
    Gemma keep 1 less (model.norm_offset = 1): a decay of everything would pull norms to 0 here, and
    in transformers to 1, so the same settings would be another training. Most recipes let norms be.
    """,
    example="""
    [model]
    norm_offset = 1.0
    [optimizer]
    %s
    """,
    bad='decay = "all"',
    fixed='decay = "matrices"',
)


CONTEXT_AREA = Area("context")
"""Context parallelism: how a sequence, and the heads of attention, are cut over cp."""

CONTEXT_DIVIDES_SEQUENCE = Rule(
    id="context-divides-sequence",
    why="""
    Each context rank holds an equal part of a sequence, so cp must divide sequence_length. With
    "ring", "gathered" and "ulysses-ring" the sequence is cut into two chunks for each of the n
    places of a ring, n = cp / ulysses_degree, and place i holds chunks i and 2n - 1 - i: so the
    work of a causal mask is the same everywhere (Llama 3, 2024, section 3.3.2). Then 2n must divide
    sequence_length, too. "striped" deals out single tokens and "ulysses" has no ring: cp is enough.
    """,
    example="""
    [mesh]
    cp = 4
    [batch]
    %s
    """,
    bad="sequence_length = 252       # 4 x 63, but not a multiple of 2 x 4",
    fixed="sequence_length = 256",
)

ULYSSES_DIVIDES_HEADS = Rule(
    id="ulysses-divides-heads",
    why="""
    Ulysses exchanges heads for positions: within attention each of ulysses_degree ranks has all
    positions of its group, and an equal share of the query heads (Jacobs et al., "DeepSpeed
    Ulysses", 2023). So the degree must divide the query heads that tensor parallelism leaves on a
    rank, heads / tp. Key/value heads may be fewer: they are replicated as needed.
    """,
    example="""
    [model]
    heads = 4
    [mesh]
    cp = 8
    [context]
    %s
    """,
    bad='kind = "ulysses"            # 4 heads over 8 ranks',
    fixed="""
    kind = "ulysses-ring"
    ulysses_degree = 4          # a ring of 2 such groups
    """,
)

ULYSSES_DIVIDES_CP = Rule(
    id="ulysses-divides-cp",
    why="""
    The context ranks form cp / ulysses_degree groups of ulysses_degree neighbours: heads are
    exchanged within a group, keys and values go around a ring of groups (Fang & Zhao, "USP", 2024).
    With "ulysses" there is one group, and its degree is cp.
    """,
    example="""
    [mesh]
    cp = 4
    [context]
    kind = "ulysses-ring"
    %s
    """,
    bad="ulysses_degree = 3",
    fixed="ulysses_degree = 2",
)

ATTENTION_KERNEL_TAKES = Rule(
    id="attention-kernel-takes",
    why="""
    Each kernel of attention takes some dtypes, widths of heads and devices. FlashAttention and
    cuDNN run on GPUs, in bf16 or fp16, with heads of a multiple of 8 elements, up to 256 for
    FlashAttention and 128 for cuDNN, and have no cap on scores. "plain" takes everything. "auto",
    the default, is the fastest kernel that takes the run: on Hopper and Blackwell cuDNN's for
    whole squares of attention, and FlashAttention for all else. `echelon plan` says what it is.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [precision]
    parameters = "%s"
    [context]
    attention = "cudnn"
    """,
    bad="fp32",
    fixed="bf16",
)


COLLECTIVES_AREA = Area("collectives")
"""How ranks sum and gather."""

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
