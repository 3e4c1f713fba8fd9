# SPDX-License-Identifier: Apache-2.0
"""Rules about expert parallelism: which ranks hold which experts, and how tokens travel to them."""

from echelon.core.rules import Rule

_EXPERTS = """[model.experts]
    num_experts = 8
    top_k = 2
    ffn = 64"""

EP_DIVIDES_EXPERTS = Rule(
    id="ep-divides-experts",
    why="""
    Expert parallelism shares out the experts of a block among ep ranks (GShard, 2020). Each gets
    as many whole experts as the others, so ep divides num_experts.
    """,
    example="""
    [mesh]
    dp_shard = 4
    ep = 4
    [model.experts]
    %s
    top_k = 2
    ffn = 64
    """,
    bad="num_experts = 6",
    fixed="num_experts = 8",
)

EP_DIVIDES_RANKS = Rule(
    id="ep-divides-ranks",
    why="""
    ep needs no ranks of its own: it is folded over those of dp_shard x cp x tp, which see other
    tokens of one replica; with expert_tp > 1 over dp_shard x cp, for then tensor ranks hold pieces
    of the same experts. Each ep neighbours hold all experts once, so ep divides that product.
    Replicas (dp_replicate) hold copies of everything and are no part of it.
    """,
    example=f"""
    [mesh]
    %s
    ep = 4
    {_EXPERTS}
    """,
    bad="dp_replicate = 4",
    fixed="dp_shard = 4",
)

EXPERT_TP_IS_ONE_OR_TP = Rule(
    id="expert-tp-is-one-or-tp",
    why="""
    Tensor ranks hold whole experts and take each its part of the tokens (expert_tp = 1), or they
    cut every expert like a dense MLP (expert_tp = tp). There is nothing between.
    """,
    example=f"""
    [mesh]
    tp = 2
    [experts]
    %s
    {_EXPERTS}
    """,
    bad="expert_tp = 4",
    fixed="expert_tp = 2",
)

EXPERT_TP_DIVIDES_FFN = Rule(
    id="expert-tp-divides-ffn",
    why="""
    expert_tp cuts the inner width of an expert into equal pieces, as tensor parallelism does that
    of a dense MLP. With expert_tp = 1, experts are whole, and their width is free.
    """,
    example="""
    [mesh]
    %s
    [model.experts]
    num_experts = 8
    top_k = 2
    ffn = 63
    """,
    bad="""
    tp = 2
    [experts]
    expert_tp = 2
    """,
    fixed="tp = 2",
)

TP_DIVIDES_TOKENS = Rule(
    id="tp-divides-tokens",
    why="""
    Each tensor rank routes an equal part of the tokens of a microbatch, whatever becomes of the
    experts: tp divides microbatch_sequences x sequence_length / cp. (With sequence_parallel the
    sequence is cut before, and sequence-parallel-divides-sequence says so.)
    """,
    example=f"""
    [mesh]
    tp = 2
    {_EXPERTS}
    [batch]
    %s
    sequence_length = 127
    """,
    bad="microbatch_sequences = 1",
    fixed="microbatch_sequences = 2",
)

PADDED_NEEDS_CAPACITY = Rule(
    id="padded-needs-capacity",
    why="""
    padded sends as many rows to every expert whatever the routing, so that no size changes from
    step to step. That many is the capacity: without one there is no size to pad to.
    """,
    example=f"""
    [experts]
    %s
    {_EXPERTS}
    """,
    bad="padded = true",
    fixed="""
    padded = true
    capacity_factor = 1.25
    """,
)

PADDED_TRAVELS_FLAT = Rule(
    id="padded-travels-flat",
    why="""
    Two hops send a token once to each node that it reaches, so how much crosses follows from the
    routing: there is no fixed size. Padded rows go straight to the ranks of their experts.
    """,
    example="""
    [mesh]
    dp_shard = 16
    ep = 16
    [cluster]
    preset = "16xh100"
    [experts]
    padded = true
    %s
    [model.experts]
    num_experts = 16
    top_k = 2
    ffn = 64
    [batch]
    global_sequences = 32
    """,
    bad="""
    capacity_factor = 1.25
    dispatch = "two-hop"
    """,
    fixed="capacity_factor = 1.25",
)

TWO_HOP_NEEDS_NODES = Rule(
    id="two-hop-needs-nodes",
    why="""
    With two hops a token crosses to each node that it reaches once, and is handed on inside of it
    (DeepSeek-V3, 2024, section 3.2.2). That needs ep ranks on several nodes, as many on each, and
    more than one: on one node nothing crosses, and one rank to a node has nothing to hand on.
    To try it on one machine: cluster.file = "examples/two-nodes.toml", two nodes of two ranks.
    """,
    bad=f"""
    [mesh]
    dp_shard = 4
    ep = 4
    [experts]
    dispatch = "two-hop"        # four ranks of one laptop
    {_EXPERTS}
    """,
    fixed="""
    [mesh]
    dp_shard = 16
    ep = 16
    [cluster]
    preset = "16xh100"          # two nodes of 8
    [experts]
    dispatch = "two-hop"
    [model.experts]
    num_experts = 16
    top_k = 2
    ffn = 64
    [batch]
    global_sequences = 32
    """,
)

CHUNKS_DIVIDE_TOKENS = Rule(
    id="chunks-divide-tokens",
    why="""
    With chunks the tokens of a microbatch travel to their experts in equal parts: while one is
    computed the next is on its way. So chunks divides the tokens that a rank sends:
    microbatch_sequences x sequence_length / cp, and / tp where tensor ranks hold whole experts.
    """,
    example=f"""
    [mesh]
    dp_shard = 2
    ep = 2
    [experts]
    %s
    {_EXPERTS}
    """,
    bad="chunks = 3                  # of 2 x 128 tokens",
    fixed="chunks = 4",
)
