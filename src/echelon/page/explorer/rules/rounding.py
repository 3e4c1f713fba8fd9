# SPDX-License-Identifier: Apache-2.0
"""What products and gathers in 8 bits need: of widths, of devices, and of each other."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.precision import (
    FP8_BLOCK_DIVIDES,
    FP8_DEVICE,
    FP8_GATHER_NEEDS_CODES,
    FP8_GATHER_OF_SQUARES,
    FP8_GATHER_ON_DEVICE,
    FP8_GATHERS_AT_ONCE,
)
from echelon.core.rulebook.zero import (
    INT8_BLOCK_DIVIDES,
    INT8_GATHER_OF_ALL,
    INT8_GATHER_ROUNDS_ONCE,
)
from echelon.page.explorer.controls import INT8_BLOCK, PRECISIONS, Controls, Record
from echelon.page.explorer.rules.broken import Broken
from echelon.page.explorer.rules.zero import WHOLE_STAGE

Width = tuple[str, int, str]
"""What a width is, how wide it is in the model, and what cuts it ("" for nothing)."""


def _cut_width(controls: Controls, widths: list[Width], block: int) -> str:
    """Return the first width that is not whole blocks on a rank, "" where all are."""
    degrees = {"": 1, "tp": controls.tp, "expert_tp": controls.expert_tp}
    for what, width, axis in widths:
        degree = degrees[axis]
        if width % (degree * block):
            over = f" / {axis} = {width} / {degree}" if axis else f" = {width}"
            return f"{what}{over} is no multiple of {block}"
    return ""


def _mlp_widths(shape: ModelShape) -> list[Width]:
    experts = shape.experts
    found: list[Width] = []
    if shape.has_dense_blocks:
        found.append(("ffn", shape.ffn, "tp"))
    if experts is not None:
        if experts.shared_experts:
            width = experts.shared_experts * experts.ffn
            found.append(("shared_experts x experts.ffn", width, "tp"))
        found.append(("experts.ffn", experts.ffn, "expert_tp"))
    return found


def _multiplied_widths(shape: ModelShape) -> list[Width]:
    """Return all widths of layers of blocks that multiply 8-bit numbers."""
    heads, latent = shape.heads, shape.latent
    found: list[Width] = [("hidden", shape.hidden, "")]
    if latent is None:
        found.append(("heads x head_dim", heads * shape.head_dim, "tp"))
        found.append(("kv_heads x head_dim", shape.kv_heads * shape.head_dim, "tp"))
    else:
        nope, rope, value = latent.nope_dim, latent.rope_dim, latent.value_dim
        if latent.query_rank is not None:
            found.append(("latent.query_rank", latent.query_rank, ""))
        found.append(("latent.kv_rank", latent.kv_rank, ""))
        found.append(("heads x (nope_dim + rope_dim)", heads * (nope + rope), "tp"))
        found.append(("heads x (nope_dim + value_dim)", heads * (nope + value), "tp"))
        found.append(("heads x value_dim", heads * value, "tp"))
    return [*found, *_mlp_widths(shape)]


def _row_widths(shape: ModelShape) -> list[Width]:
    """Return how long rows of all matrices are that are gathered in int8."""
    latent = shape.latent
    found: list[Width] = [("hidden", shape.hidden, "")]
    if latent is None:
        found.append(("heads x head_dim", shape.heads * shape.head_dim, "tp"))
    else:
        if latent.query_rank is not None:
            found.append(("latent.query_rank", latent.query_rank, ""))
        found.append(("latent.kv_rank", latent.kv_rank, ""))
        found.append(("heads x value_dim", shape.heads * latent.value_dim, "tp"))
    return [*found, *_mlp_widths(shape)]


def broken_by_fp8(controls: Controls, shape: ModelShape, cluster: Record) -> Iterator[Broken]:
    """Yield what products in 8 bits, and gathers of their codes, break."""
    precision = PRECISIONS[controls.precision]
    if precision.is_fp8:
        cut = _cut_width(controls, _multiplied_widths(shape), precision.fp8_block)
        if cut != "":
            yield Broken(rule=FP8_BLOCK_DIVIDES.id, message=f"products in fp8, but {cut}")
        if controls.tp_overlap != "none":
            yield Broken(
                rule=FP8_GATHERS_AT_ONCE.id,
                message=f"{controls.tp_overlap} with products in fp8: codes and scales are "
                "gathered at once, in no chunks",
            )
        if cluster["gpus"] and not cluster["multiplies_fp8"]:
            yield Broken(
                rule=FP8_DEVICE.id,
                message=f"products in fp8, but {cluster['device']} has no peak of fp8",
            )
    if controls.gather != "fp8":
        return
    if not precision.is_fp8:
        yield Broken(
            rule=FP8_GATHER_NEEDS_CODES.id,
            message="codes of fp8 are gathered, but no weight is multiplied in 8 bits",
        )
    if controls.zero < WHOLE_STAGE:
        yield Broken(
            rule=FP8_GATHER_NEEDS_CODES.id,
            message=f"codes of fp8 are gathered, but ZeRO {controls.zero} keeps weights whole: "
            f"{controls.zero} < {WHOLE_STAGE}",
        )
    if precision.has_tensor_scales:
        yield Broken(
            rule=FP8_GATHER_OF_SQUARES.id,
            message="codes of fp8 are gathered with the scales of squares, not of whole tensors",
        )
    if controls.parameter_offload != "none":
        yield Broken(
            rule=FP8_GATHER_ON_DEVICE.id,
            message="codes of fp8 are made of slices that are on the device, not on the host",
        )


def broken_by_int8(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what gathers of matrices in int8 break."""
    if controls.gather != "int8":
        return
    cut = _cut_width(controls, _row_widths(shape), INT8_BLOCK)
    if cut != "":
        yield Broken(rule=INT8_BLOCK_DIVIDES.id, message=f"gathers in int8, but {cut}")
    if controls.zero < WHOLE_STAGE:
        yield Broken(
            rule=INT8_GATHER_OF_ALL.id,
            message=f"gathers in int8, but ZeRO {controls.zero} keeps matrices whole: "
            f"{controls.zero} < {WHOLE_STAGE}",
        )
    elif shape.latent is not None and controls.sequence_parallel and controls.tp > 1:
        yield Broken(
            rule=INT8_GATHER_OF_ALL.id,
            message="gathers in int8 with sequence parallelism: matrices that lead down to latent "
            "vectors are whole on each tensor rank",
        )
    if PRECISIONS[controls.precision].is_fp8:
        yield Broken(
            rule=INT8_GATHER_ROUNDS_ONCE.id,
            message="gathers in int8 with products in fp8: weights would be rounded twice",
        )
