# SPDX-License-Identifier: Apache-2.0
"""Rules about the parts of a block: what turns, factors, norms and the way around a branch."""

from echelon.core.rules import Rule

TURNS_NEED_ROTARY = Rule(
    id="turns-need-rotary",
    why="""
    model.rotary says which dims of a head turn with the position. So it needs rotary positions, of
    ordinary attention: latent attention turns the dims of latent.rope_dim.
    """,
    example="""
    [model]
    %s
    """,
    bad="""
    positions = "learned"
    rotary.fraction = 0.5
    """,
    fixed="""
    positions = "rope"
    rotary.fraction = 0.5
    """,
)

HEADS_TURN = Rule(
    id="heads-turn",
    why="""
    Dims turn in pairs, so of a head rotary.fraction x head_dim dims turn, rounded down to an even
    number. Where that is none, no position would enter: rotary.none_every is for blocks like that.
    """,
    example="""
    [model]
    head_dim = 8
    [model.rotary]
    %s
    """,
    bad="fraction = 0.2              # 8 x 0.2 = 1.6, rounded down to 0",
    fixed="fraction = 0.25",
)

FACTOR_WITHOUT_DROPOUT = Rule(
    id="factor-without-dropout",
    why="""
    What a branch adds to the stream is multiplied by multipliers.residual, and token vectors by
    multipliers.embedding; or a part of them is dropped. The bytes of both at once have no formula,
    and no model that is known was trained so.
    """,
    bad="""
    [model]
    dropout = 0.1
    [model.multipliers]
    residual = 0.22
    """,
    fixed="""
    [model]
    dropout = 0.0
    [model.multipliers]
    residual = 0.22
    """,
)

BLOCK_FORMS_COMPOSE = Rule(
    id="block-forms-compose",
    why="""
    Norms after branches (model.norm_place), and attention beside the MLP (model.residual), are
    computed, split and counted for blocks of ordinary attention and a dense MLP, without dropout;
    and not both of them at once. Codes of 8 bits need a norm before each branch.
    """,
    example="""
    [model]
    residual = "parallel"
    %s
    """,
    bad='norm_place = "both"',
    fixed='norm_place = "before"',
)
