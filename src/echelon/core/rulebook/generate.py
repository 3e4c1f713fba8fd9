# SPDX-License-Identifier: Apache-2.0
"""Rules of generation: what a prompt may be, how ranks may split it, how tokens are chosen."""

from echelon.core.rules import Rule

GENERATE_HAS_PROMPT = Rule(
    id="generate-has-prompt",
    why="""
    A model says what comes next after at least one token. A prompt without any gives it nothing to
    read, and there is no token that every tokenizer begins a text with.
    """,
    bad="echelon generate runs/nano --prompt ''",
    fixed="echelon generate runs/nano --prompt 'def '",
)

GENERATE_FITS_POSITIONS = Rule(
    id="generate-fits-positions",
    why="""
    A model has been made for so many positions. A learned table has no row for the next one, and
    rotations by angles that no training has shown give text without sense. The last token that is
    written is not read, so a prompt of p tokens and n written ones take p + n - 1 positions.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --max-tokens 1022     # 4 + 1021 of 1024",
    fixed="echelon generate runs/nano --prompt 'def ' --max-tokens 1021",
)

GENERATE_SETTINGS = Rule(
    id="generate-settings",
    why="""
    A checkpoint says which model it is. Generation chooses only how ranks split it: mesh.tp,
    mesh.pp, mesh.ep, experts.expert_tp, and mesh.dp_replicate, whose ranks share out the prompts.
    Nothing is sharded over dp_shard, for there are no gradients and no optimizer; cp would cut
    prompts, whose keys are split by heads and by blocks already. All others are of training.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --set mesh.cp=2",
    fixed="echelon generate runs/nano --prompt 'def ' --set mesh.tp=2",
)

GENERATE_EXPERTS = Rule(
    id="generate-experts",
    why="""
    Every tensor rank has all tokens, so none travels to an expert: a rank computes what its own
    experts make of them, and the ranks sum. For that the tensor ranks hold each expert once (ep =
    tp), hold a piece of each (expert_tp = tp), or hold all of them (both 1).
    """,
    bad="echelon generate RUN --prompt 'def ' --set mesh.tp=4 --set mesh.ep=2",
    fixed="echelon generate RUN --prompt 'def ' --set mesh.tp=4 --set mesh.ep=4",
)

GENERATE_SHARES_PROMPTS = Rule(
    id="generate-shares-prompts",
    why="""
    Ranks of dp_replicate have the same weights and share out the prompts. One that gets no prompt
    would hold a whole model and do nothing.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --set mesh.dp_replicate=2",
    fixed="echelon generate runs/nano --prompt 'def ' --prompt 'class ' --set mesh.dp_replicate=2",
)

GENERATE_CAUSAL = Rule(
    id="generate-causal",
    why="""
    Text is written from left to right: the keys of what has been read stay as they are. In a model
    whose queries also meet later keys every new token would change all of them.
    """,
    bad="a model with causal = false",
    fixed="a model with causal = true",
)

GENERATE_SAMPLING = Rule(
    id="generate-sampling",
    why="""
    Logits are divided by the temperature; at 0 the likeliest token is taken, and what limits a draw
    (top_k, top_p) has no effect. top_p is a probability, the others are counts of at least 1.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --temperature 0 --top-k 5",
    fixed="echelon generate runs/nano --prompt 'def ' --temperature 0.8 --top-k 5",
)
