"""Rules about batches and sequences."""

from __future__ import annotations

from echelon.core.rules import Rule

BATCH_DIVIDES = Rule(
    id="batch-divides",
    why="""
    A global batch is shared out evenly: global_sequences = microbatches x microbatch_sequences x
    the data-parallel degree. Nothing is dropped or padded to make it fit.
    """,
    bad="""
    [mesh]
    dp_replicate = 4
    [batch]
    global_sequences = 30
    microbatch_sequences = 2
    """,
    fixed="""
    [mesh]
    dp_replicate = 4
    [batch]
    global_sequences = 32
    microbatch_sequences = 2
    """,
)

SEQUENCE_FITS_POSITIONS = Rule(
    id="sequence-fits-positions",
    why="""
    A sequence may not be longer than the positions that the model has. Learned positions end
    there; rotary ones go on, but a model is meant up to max_positions.
    """,
    bad="""
    [model]
    preset = "gpt2"             # 1024 positions
    [batch]
    sequence_length = 2048
    """,
    fixed="""
    [model]
    preset = "gpt2"
    max_positions = 2048
    [batch]
    sequence_length = 2048
    """,
)

LEARNING_RATE_FITS_STEPS = Rule(
    id="learning-rate-fits-steps",
    why="""
    The learning rate rises for warmup_steps and, with "wsd", falls for decay_steps; together they
    may not be longer than the run, or it would never reach its peak or its end.
    """,
    bad="""
    [train]
    steps = 100
    [optimizer]
    warmup_steps = 200
    """,
    fixed="""
    [train]
    steps = 1000
    [optimizer]
    warmup_steps = 200
    """,
)
