# SPDX-License-Identifier: Apache-2.0
"""Rules about a run that has started."""

from echelon.core.rules import Rule

LOSS_NOT_FINITE = Rule(
    id="loss-not-finite",
    why="""
    A loss or a gradient that is NaN or infinite would spoil every weight. All ranks learn of it in
    the same step, before the optimizer runs, so the weights and the last checkpoint are those of
    the step before. The step is then run once more to find the first module, microbatch and samples
    whose output is not finite, or else the first gradient, on the rank that computed it.
    """,
    bad="--set optimizer.learning_rate=1000",
    fixed="--set optimizer.learning_rate=3e-4 --set optimizer.warmup_steps=100",
)

RESUME_WITHIN_STEPS = Rule(
    id="resume-within-steps",
    why="""
    A resumed run takes the steps that are left. A checkpoint that has taken more steps than the run
    is long leaves none, and its weights are not those that the run would end with.
    """,
    bad="echelon train run.toml --resume runs/first --set train.steps=6     # at step 12 by now",
    fixed="echelon train run.toml --resume runs/first --set train.steps=24",
)

RESUME_SAME_DATA = Rule(
    id="resume-same-data",
    why="""
    Which samples a step reads is a function of the seed, the step and the data. A run that went on
    with other data would read some samples twice and some never, and say nothing of it.
    """,
    bad="echelon train run.toml --resume runs/first --set data.source=another/",
    fixed="echelon train run.toml --resume runs/first",
)
