# SPDX-License-Identifier: Apache-2.0
"""Rules of mixtures, several sources with weights that may change, and of looking at data."""

from echelon.core.rules import Rule

MIXTURE_PARTS = Rule(
    id="mixture-parts",
    why="""
    Each table of data.mixture names a source and its weight, a number above 0; until_step, where it
    is there, is a whole number from 1. Weights need not add up to one. A source whose share is less
    than half of 1/65536 would never be read.
    """,
    example="""
    [[data.mixture]]
    path = "web"
    weight = 9
    [[data.mixture]]
    path = "code"
    weight = %s
    """,
    bad="0",
    fixed="1",
)

MIXTURE_SCHEDULE = Rule(
    id="mixture-schedule",
    why="""
    All tables with the same until_step are one phase, those without it the last one. In a phase a
    source has one weight, and every step of the run is in a phase.
    """,
    example="""
    [[data.mixture]]
    path = "web"
    weight = 1.0
    until_step = 1000
    [[data.mixture]]
    path = "%s"
    weight = 0.5
    until_step = 1000
    [[data.mixture]]
    path = "code"
    weight = 1.0
    """,
    bad="web",
    fixed="code",
)

SAMPLE_OF_STEP = Rule(
    id="sample-of-step",
    why="""
    A step reads batch.global_sequences samples, counted from 0; steps are counted from 1, as step
    lines count them. Prepared data by itself has no steps: the seed, the batch and the length of
    sequences are those of a run.
    """,
    example="""
    echelon train nano
    %s
    """,
    bad="echelon data look runs/nano --step 0",
    fixed="echelon data look runs/nano --step 1 --sample 3",
)
