# SPDX-License-Identifier: Apache-2.0
"""Rules about mixtures of experts: which experts a token meets, and what keeps their load even."""

from echelon.core.rules import Rule

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
