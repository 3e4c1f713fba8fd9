# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes attention, as `models/attention/local.py` chooses: their bytes differ.

The plain kernel holds blocks of scores; a GPU's memory-efficient kernel repeats key heads, and
gives its output sequence by sequence; flash attention, and the kernel of a CPU, do neither. Flash
attention takes a window, or all documents of a batch, in one call. cuDNN's kernel takes full and
causal squares in its place, and holds what it does: the output as the queries lie, a float32
log-sum-exp for each query and head, gradients of key heads as many as there are.
"""

from __future__ import annotations

from echelon.core.choices.attention_kernels import ATTENTION_KERNELS
from echelon.core.plan import Plan


def on_gpu(plan: Plan) -> bool:
    """Return whether kernels are those of a GPU."""
    return plan.cluster.backend == "nccl"


def plain_kernel_runs(plan: Plan) -> bool:
    """Return whether the plain kernel runs, on the most that a plan knows of its masks.

    It is asked for, or fused ones cannot: they cap no scores; those of a GPU take no float64, heads
    of certain widths only, and where flash attention takes none, in float16 no bands, of which a
    window has some.
    """
    model, parameters = plan.model, plan.mathematics.precision.parameters
    if model.soft_cap is not None or plan.layout.context.attention == "plain":
        return True
    if not on_gpu(plan):
        return False
    flash = ATTENTION_KERNELS["flash"]
    bands = parameters == "fp16" and model.window is not None
    wide = model.head_dim > flash.max_head_dim
    return parameters == "fp64" or (bands and wide) or model.head_dim % flash.head_dim_multiple > 0


def flash_kernel_runs(plan: Plan) -> bool:
    """Return whether flash attention of a GPU runs: on 16-bit elements, heads not too wide."""
    flash, parameters = ATTENTION_KERNELS["flash"], plan.mathematics.precision.parameters
    fits = parameters in flash.dtypes and plan.model.head_dim <= flash.max_head_dim
    return on_gpu(plan) and fits and not plain_kernel_runs(plan)


def efficient_kernel_runs(plan: Plan) -> bool:
    """Return whether a GPU's memory-efficient kernel runs."""
    return on_gpu(plan) and not plain_kernel_runs(plan) and not flash_kernel_runs(plan)


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
