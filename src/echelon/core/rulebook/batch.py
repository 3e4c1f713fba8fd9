# SPDX-License-Identifier: Apache-2.0
"""Rules about batches and sequences."""

from echelon.core.rules import Rule

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
