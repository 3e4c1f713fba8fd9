# SPDX-License-Identifier: Apache-2.0
"""Rules about what a prediction needs to know."""

from echelon.core.rules import Rule

ZERO_NEEDS_DEGREE = Rule(
    id="zero-needs-degree",
    why="""
    What ZeRO saves depends on N, the number of data ranks that share the states of a model. At
    stage 1 a rank holds 4 psi + 12 psi/N bytes: 16 psi at N = 1, 7 psi at N = 4, 4.19 psi at N =
    64. "4x less" is the limit for N without end, which no cluster reaches, so without N there is no
    figure to give.
    """,
    bad="echelon explain zero --parameters 7e9",
    fixed="echelon explain zero --parameters 7e9 --dp 4",
)

PREDICTION_IN_RANGE = Rule(
    id="prediction-in-range",
    why="""
    A number of parameters, of ranks or of bytes that a prediction is asked for must be at least 1,
    and finite; a number of ranks or parameters is whole.
    """,
    bad="echelon explain zero --dp 0",
    fixed="echelon explain zero --dp 1",
)
