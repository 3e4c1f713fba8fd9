# SPDX-License-Identifier: Apache-2.0
"""Rules about the loss scale of a run that has started."""

from echelon.core.rules import Rule

LOSS_SCALE_EXHAUSTED = Rule(
    id="loss-scale-exhausted",
    why="""
    A gradient that overflows fp16 skips its step on every rank, and a dynamic loss scale halves so
    that the next one fits. Gradients that overflow at loss_scale_min too, or step after step under
    a fixed scale, are no longer too large for their format: the training diverges, and every step
    from now on would be skipped. The weights are those of the last step that did not overflow.
    """,
    bad="--set optimizer.learning_rate=1",
    fixed="""
    --set optimizer.learning_rate=3e-4 --set optimizer.warmup_steps=100
    --set precision.parameters=bf16     # the range of fp32: no loss scale is needed
    """,
)
