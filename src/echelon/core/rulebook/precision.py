# SPDX-License-Identifier: Apache-2.0
"""Rules about precision: which dtypes go together, and what fp16 needs."""

from echelon.core.rules import Rule

FP64_ALONE = Rule(
    id="fp64-alone",
    why="""
    fp64 is there to show that a split is exact, half precision to be fast. A run that rounds to
    half precision anywhere is exact to 3 digits, and its other 13 digits say nothing.
    """,
    example="""
    [precision]
    parameters = "bf16"
    %s
    """,
    bad='master = "fp64"',
    fixed='master = "fp32"',
)

ONE_HALF_FORMAT = Rule(
    id="one-half-format",
    why="""
    bf16 reaches 3e38 with 8 significant bits, fp16 reaches 65504 with 11. Cast into each other,
    bf16 values become infinite and fp16 values lose their digits: a run uses one of them.
    """,
    example="""
    [precision]
    parameters = "bf16"
    %s
    """,
    bad='reduction = "fp16"',
    fixed='reduction = "bf16"',
)

GRADIENTS_HOLD_PARAMETERS = Rule(
    id="gradients-hold-parameters",
    why="""
    Backward gives gradients in the dtype of the parameters; they add up over microbatches in
    `gradients`, which is the same dtype or a wider one: in a narrower one each sum would lose what
    backward computed. To send fewer bytes, make `reduction` narrower: it is rounded to once.
    """,
    example="""
    [precision]
    %s
    """,
    bad='gradients = "bf16"          # parameters are fp32',
    fixed='reduction = "bf16"',
)

MASTER_HOLDS_PARAMETERS = Rule(
    id="master-holds-parameters",
    why="""
    The optimizer updates the copy in `master` and rounds the result to `parameters`. A master
    narrower than the parameters would throw away digits that the parameters have.
    """,
    bad="""
    [precision]
    master = "bf16"             # parameters are fp32
    """,
    fixed="""
    [precision]
    parameters = "bf16"
    master = "fp32"
    """,
)

FP16_NEEDS_MASTER = Rule(
    id="fp16-needs-master",
    why="""
    The smallest number above zero in fp16 is 6e-8. The square of a gradient below 2.4e-4 is zero
    there, and so is AdamW's eps of 1e-8: the update would divide by zero. Parameters in fp16 are
    updated through a master copy in fp32 (Micikevicius et al., 2018, section 3.1).
    """,
    example="""
    [precision]
    parameters = "fp16"
    %s
    loss_scaling = "dynamic"
    """,
    bad='master = "fp16"',
    fixed='master = "fp32"',
)

FP16_NEEDS_LOSS_SCALING = Rule(
    id="fp16-needs-loss-scaling",
    why="""
    Many gradients are below 6e-8, the smallest number of fp16, and would be zero. The loss, and so
    each gradient, is multiplied by a scale before backward and divided by it after the reduction
    (Micikevicius et al., 2018, section 3.2). "dynamic" finds the scale; "fixed" takes loss_scale.
    """,
    bad="""
    [precision]
    parameters = "fp16"
    """,
    fixed="""
    [precision]
    parameters = "fp16"
    loss_scaling = "dynamic"
    """,
)

LOSS_SCALE_ABOVE_MINIMUM = Rule(
    id="loss-scale-above-minimum",
    why="""
    A dynamic scale starts at loss_scale and halves when gradients overflow, never below
    loss_scale_min. It cannot start below the least that it may be.
    """,
    example="""
    [precision]
    parameters = "fp16"
    loss_scaling = "dynamic"
    %s
    loss_scale_min = 1024.0
    """,
    bad="loss_scale = 128.0",
    fixed="loss_scale = 65536.0",
)
