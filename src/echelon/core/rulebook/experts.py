# SPDX-License-Identifier: Apache-2.0
"""Rules about mixtures of experts, and about the ranks that hold experts."""

from echelon.core.rules import Area, Rule

_EXPERTS = """[model.experts]
    num_experts = 8
    top_k = 2
    ffn = 64"""

GROUPS_DIVIDE_EXPERTS = Rule(
    id="groups-divide-experts",
    why="""
    With groups, a token's experts come out of the best top_groups groups of equal size
    (DeepSeek-V3, 2024, section 2.1.2). A group is as good as the sum of its two best scores, or its
    best one (group_score), so it has two experts at least: one alone would be its expert.
    """,
    example=f"""
    {_EXPERTS}
    %s
    """,
    bad="groups = 3",
    fixed="groups = 4",
)

TOP_GROUPS_HOLD_TOP_K = Rule(
    id="top-groups-hold-top-k",
    why="""
    A token meets top_k different experts of the top_groups groups that it chooses, out of groups.
    They hold top_groups x num_experts / groups experts, which must be top_k or more.
    """,
    example="""
    [model.experts]
    num_experts = 8
    top_k = 4
    ffn = 64
    groups = 4
    %s
    """,
    bad="top_groups = 1              # a group has two experts",
    fixed="top_groups = 2",
)

RENORMALISED_GATES_DIFFER = Rule(
    id="renormalised-gates-differ",
    why="""
    With renormalise the weights of the experts that a token meets add up to 1. Of one expert the
    weight is then 1 whatever its score, and the loss has no gradient for the router: it never
    learns where to send a token. Switch Transformer (2021, section 2.1) leaves the one score as it
    is.
    """,
    example="""
    [model.experts]
    num_experts = 8
    top_k = 1
    %s
    """,
    bad="ffn = 64",
    fixed="""
    ffn = 64
    renormalise = false
    """,
)

EXPERTS_ARE_GATED = Rule(
    id="experts-are-gated",
    why="""
    An expert is an MLP with a gate: three matrices, and SiLU (SwiGLU), as in Mixtral, Qwen3 and
    DeepSeek, or the clamped one of gpt-oss. Experts of two matrices are not supported.
    """,
    bad=f"""
    [model]
    gated = false
    activation = "gelu"
    {_EXPERTS}
    """,
    fixed=_EXPERTS,
)

EXPERTS_HAVE_NO_BIAS = Rule(
    id="experts-have-no-bias",
    why="""
    model.mlp_bias is about dense MLPs, and those of a model with experts have none. Biases of
    routed experts (gpt-oss) are model.experts.bias, that of the logits of a router is
    model.experts.logit_bias, and one by which it chooses alone is model.experts.router_bias.
    """,
    bad=f"""
    [model]
    mlp_bias = true
    {_EXPERTS}
    """,
    fixed=_EXPERTS,
)

BIAS_BALANCE_HAS_BIAS = Rule(
    id="bias-balance-has-bias",
    why="""
    Balancing without a loss moves a bias of each expert, which takes part in the choice of experts
    (Wang et al. 2024; DeepSeek-V3, section 2.1.2). So the router has that bias: where
    model.experts.router_bias is not set, it is true.
    """,
    example="""
    [model.experts]
    num_experts = 8
    top_k = 2
    %s
    [experts]
    balance = "bias"
    """,
    bad="""
    ffn = 64
    router_bias = false
    """,
    fixed="ffn = 64",
)

CAPACITY_HOLDS_TOKENS = Rule(
    id="capacity-holds-tokens",
    why="""
    With a capacity factor c an expert has room for c T k / E tokens of each sequence of T, rounded
    up: c times its even share, where a token meets k of E experts. Where that is less than one
    token, nearly everything would be dropped, or the factor would mean nothing.
    """,
    example=f"""
    {_EXPERTS}
    [experts]
    %s
    """,
    bad="capacity_factor = 0.01      # 0.01 x 128 x 2 / 8 = 0.32 tokens",
    fixed="capacity_factor = 1.25      # 40 tokens",
)


EXPERT_PARALLEL_AREA = Area("expert_parallel")
"""Expert parallelism: which ranks hold which experts, and how tokens travel to them."""

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
