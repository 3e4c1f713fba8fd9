# SPDX-License-Identifier: Apache-2.0
"""Rules about multi-head latent attention."""

from echelon.core.rules import Rule

_LATENT = """[model.latent]
    query_rank = 48
    kv_rank = 32
    nope_dim = 16
    rope_dim = 8
    value_dim = 16"""

LATENT_HEADS_HAVE_KEYS = Rule(
    id="latent-heads-have-keys",
    why="""
    In latent attention the keys and values of all heads are made out of one narrow vector
    (DeepSeek-V2, 2024, section 2.1): that is what saves memory, and every head has keys of its own.
    So kv_heads is heads.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="kv_heads = 2",
    fixed="kv_heads = 4",
)

LATENT_HEAD_HAS_TWO_PARTS = Rule(
    id="latent-head-has-two-parts",
    why="""
    A head of latent attention has nope_dim dims without positions, and rope_dim dims that rotary
    positions turn (DeepSeek-V2, 2024, section 2.1.3). head_dim is their sum, and need not be set.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    head_dim = 32               # 16 + 8 = 24
    """,
    fixed="kv_heads = 4",
)

LATENT_POSITIONS_ARE_ROTARY = Rule(
    id="latent-positions-are-rotary",
    why="""
    Latent attention has a part of each head for rotary positions, rope_dim dims, so positions enter
    there.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    positions = "learned"
    """,
    fixed="kv_heads = 4",
)

LATENT_ATTENTION_IS_PLAIN = Rule(
    id="latent-attention-is-plain",
    why="""
    Latent attention norms its narrow vectors, not each head, and its matrices have no biases:
    qkv_bias, output_bias and qk_norm are about ordinary attention.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    qk_norm = true
    """,
    fixed="kv_heads = 4",
)

LATENT_VALUE_FITS_KEY = Rule(
    id="latent-value-fits-key",
    why="""
    Attention is computed for keys and values of one width: values of latent attention, narrower
    than keys, get zeros behind them (128 dims beside 192 in DeepSeek-V3). So value_dim is at most
    nope_dim + rope_dim.
    """,
    bad="""
    [model]
    heads = 4
    kv_heads = 4
    [model.latent]
    query_rank = 48
    kv_rank = 32
    nope_dim = 16
    rope_dim = 8
    value_dim = 32              # 16 + 8 = 24
    """,
    fixed=f"""
    [model]
    heads = 4
    kv_heads = 4
    {_LATENT}
    """,
)
