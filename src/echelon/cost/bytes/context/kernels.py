"""Which kernel computes attention, as `models/attention/local.py` chooses: their bytes differ.

The plain kernel holds blocks of scores; a GPU's memory-efficient kernel repeats key heads, and
gives its output sequence by sequence; flash attention, and the kernel of a CPU, do neither.
"""

from __future__ import annotations

from echelon.core.plan import DTYPE_BYTES, Plan

HEAD_DIM_MULTIPLE = 8  # elements
FLASH_MAX_HEAD_DIM = 256  # elements
WIDEST_FUSED_BYTES = 4
"""Bytes of an element of the widest dtype that fused kernels of a GPU take."""


def on_gpu(plan: Plan) -> bool:
    """Return whether kernels are those of a GPU."""
    return plan.cluster.backend == "nccl"


def plain_kernel_runs(plan: Plan) -> bool:
    """Return whether the plain kernel runs, on the most that a plan knows of its masks.

    Fused ones cap no scores; those of a GPU take no float64, heads of certain widths only, and in
    float16 no bands, of which a window has some.
    """
    model = plan.model
    if model.soft_cap is not None or not on_gpu(plan):
        return model.soft_cap is not None
    parameters = plan.mathematics.precision.parameters
    wide = DTYPE_BYTES[parameters] > WIDEST_FUSED_BYTES
    bands = parameters == "fp16" and model.window is not None
    return wide or bands or model.head_dim % HEAD_DIM_MULTIPLE > 0


def efficient_kernel_runs(plan: Plan) -> bool:
    """Return whether a GPU's memory-efficient kernel runs.

    Flash attention takes 16-bit elements and heads that are not too wide.
    """
    narrow = DTYPE_BYTES[plan.mathematics.precision.parameters] < WIDEST_FUSED_BYTES
    flash = narrow and plan.model.head_dim <= FLASH_MAX_HEAD_DIM
    return on_gpu(plan) and not plain_kernel_runs(plan) and not flash


def output_is_by_head(plan: Plan) -> bool:
    """Return whether attention gives its output head by head, or sequence by sequence.

    Where that is merged from pieces of which the first has not all queries it is added up in the
    order of positions.
    """
    capped = plain_kernel_runs(plan)
    if not on_gpu(plan):
        return capped
    pieces = plan.layout.context.record.gathers_keys and plan.placement.ring_degree > 1
    several = plan.layout.microbatch_sequences > 1
    return (capped or (efficient_kernel_runs(plan) and several)) and not pieces
