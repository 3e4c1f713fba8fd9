# SPDX-License-Identifier: Apache-2.0
"""Rules about precision: dtypes, products of 8-bit numbers, the loss scale."""

from echelon.core.rules import Area, Rule

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


FP8_AREA = Area("fp8")
"""Products of 8-bit numbers."""

FP8_BLOCK_DIVIDES = Rule(
    id="fp8-block-divides",
    why="""
    In 8 bits, precision.fp8_block neighbours of a row share a scale, and so do a square of that
    side of a weight. A tile that lay on two ranks, or were cut short on one, would be another tile
    under another layout, and numbers would be rounded otherwise. So every width of a layer on a
    rank is a multiple of it: hidden, heads x head_dim / tp, kv_heads x head_dim / tp, ffn / tp;
    of experts ffn / expert_tp; of latent attention the widths that heads come out of, too.
    """,
    example="""
    [model]
    hidden = 512
    heads = 4
    kv_heads = 4
    head_dim = 128
    ffn = 1024
    [mesh]
    %s
    [precision]
    matmul = "fp8"
    """,
    bad="tp = 16                  # 512 / 16 = 32 is no multiple of 128",
    fixed="tp = 4",
)

FP8_PARAMETERS = Rule(
    id="fp8-parameters",
    why="""
    What a code and its scale stand for is exact in bf16, fp32 and fp64, which have the range of
    scales: weight gradients are products of such numbers. In fp16, the smallest of them would be
    zero.
    """,
    example="""
    [precision]
    %s
    matmul = "fp8"
    """,
    bad='parameters = "fp16"',
    fixed='parameters = "bf16"',
)

FP8_EXPERTS_ARE_PLAIN = Rule(
    id="fp8-experts-are-plain",
    why="""
    In products of 8-bit numbers an expert is three matrices with SiLU between them. Biases of
    experts (model.experts.bias) and a clamped SwiGLU (model.experts.limit), as gpt-oss has them,
    are not built there.
    """,
    example="""
    [model.experts]
    num_experts = 8
    top_k = 2
    ffn = 64
    bias = true
    %s
    """,
    bad="""
    [precision]
    matmul = "fp8"
    fp8_block = 32
    """,
    fixed="""
    [precision]
    matmul = "parameters"
    """,
)

FP8_DEVICE = Rule(
    id="fp8-device",
    why="""
    Devices before Hopper and Ada of NVIDIA, and MI300 of AMD, multiply no 8-bit floats: the run
    would be slower than in bf16, and no more exact. A CPU multiplies none either, but computes what
    such a device would: that is how a plan is proven.
    """,
    example="""
    [cluster]
    %s
    [precision]
    parameters = "bf16"
    matmul = "fp8"
    """,
    bad='preset = "8xa100"',
    fixed='preset = "8xh100"',
)

FP8_BLOCK_OF_KERNELS = Rule(
    id="fp8-block-of-kernels",
    why="""
    Kernels of GPUs multiply 8-bit numbers of which 128 share a scale (DeepSeek-V3, 2024, section
    3.3). On a CPU any block can be computed with, so that small models can be tried.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [precision]
    parameters = "bf16"
    matmul = "fp8"
    %s
    """,
    bad="fp8_block = 64",
    fixed="fp8_block = 128",
)

FP8_GATHERS_AT_ONCE = Rule(
    id="fp8-gathers-at-once",
    why="""
    With sequence parallelism, layers that multiply 8-bit numbers gather codes and their scales,
    each in one collective: half the bytes of bf16. In chunks around a ring of tensor ranks, or
    through symmetric memory, rows travel in the dtype of the parameters. No kernel does both.
    """,
    example="""
    [model]
    hidden = 512
    heads = 4
    kv_heads = 4
    head_dim = 128
    ffn = 1024
    [mesh]
    tp = 2
    sequence_parallel = true
    %s
    [precision]
    matmul = "fp8"
    """,
    bad='tp_overlap = "ring"',
    fixed='tp_overlap = "none"',
)

FP8_HISTORY_OF_GRADIENTS = Rule(
    id="fp8-history-of-gradients",
    why="""
    Scales of whole tensors come from the largest gradients of the steps before. A loss that is
    multiplied by a scale that changes makes gradients twice as large from one step to the next:
    those that were largest would be cut off, and nothing would show it. Tiles find their scales in
    the step itself.
    """,
    example="""
    [precision]
    parameters = "fp32"
    reduction = "fp16"
    loss_scaling = "dynamic"
    matmul = "fp8"
    fp8_block = 32
    %s
    """,
    bad='fp8_scales = "tensor"',
    fixed='fp8_scales = "block"',
)

FP8_GATHER_NEEDS_CODES = Rule(
    id="fp8-gather-needs-codes",
    why="""
    With zero.gather = "fp8" ranks gather codes of 1 byte for the weights that are multiplied in 8
    bits, which they make of their slices once a step. So there must be such weights
    (precision.matmul = "fp8"), and they must be cut: at ZeRO stage 3. At the stages below, a rank
    has its weights whole, in the dtype of parameters.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    %s
    gather = "fp8"
    [precision]
    matmul = "fp8"
    fp8_block = 32
    """,
    bad="stage = 2",
    fixed="stage = 3",
)

FP8_GATHER_ON_DEVICE = Rule(
    id="fp8-gather-on-device",
    why="""
    Codes are made of slices once a step and stay on the device until the next. Slices of parameters
    that rest with the host or in files would have to come and be cast, and their codes would take
    the half of the memory that this saved: there would be less of a gain than of a loss.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 3
    gather = "fp8"
    %s
    [precision]
    matmul = "fp8"
    fp8_block = 32
    """,
    bad='parameter_offload = "host"',
    fixed='optimizer_offload = "host"',
)

FP8_GATHER_OF_SQUARES = Rule(
    id="fp8-gather-of-squares",
    why="""
    Codes that ranks gather are made with the scale of each square of a weight. With
    precision.fp8_scales = "tensor" a weight has one scale, in all steps but the first, which has
    squares: what is gathered would be of two kinds. That is not built.
    """,
    example="""
    [mesh]
    dp_shard = 2
    [zero]
    stage = 3
    gather = "fp8"
    [precision]
    matmul = "fp8"
    fp8_block = 32
    %s
    """,
    bad='fp8_scales = "tensor"',
    fixed='fp8_scales = "block"',
)


LOSS_SCALE_AREA = Area("loss_scale")
"""The loss scale of a run that has started."""

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
