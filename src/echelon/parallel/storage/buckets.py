# SPDX-License-Identifier: Apache-2.0
"""Flat buckets: where parameters and gradients live.

The parameters of a rank are laid out in a few flat tensors, and their gradients in others of the
same layout; a parameter and its gradient are views. So a bucket is one collective with no copy in
or out and one fused optimizer call, and matrices that read the same input (q, k, v; gate, up) lie
side by side and are one matrix product. Buckets are filled in the reverse order of the forward
pass, which is the order in which backward completes them (Li et al., "PyTorch Distributed", 2020,
section 3.2.3).

ZeRO cuts each bucket into equal slices, one per rank of the shard group; a rank updates its own.
What is not kept whole between uses gives its memory away (`tensor_memory.py`) and lives as a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Optimizer
from echelon.layout.buckets import BucketPlan, segment_order
from echelon.layout.stage import decays
from echelon.models.precision import E4M3, at_least_fp32
from echelon.parallel.offload import OffloadStore
from echelon.parallel.tensor_memory import (
    BufferPool,
    OwnedTensorMemory,
    PooledTensorMemory,
    TensorMemory,
)


@dataclass(slots=True, kw_only=True)
class Slot:
    """Say where one parameter lies in its bucket, and what is known of its gradient."""

    spec: ParameterSpec
    parameter: nn.Parameter
    bucket: Bucket
    start: int
    gradient: torch.Tensor
    uses: int
    counted: bool
    fresh: bool = True

    @property
    def end(self) -> int:
        """Return the first element after this parameter in the bucket."""
        return self.start + self.parameter.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Slice:
    """Hold what a bucket that is gathered in 8 bits is between uses (`parallel/fp8_gather.py`).

    `codes` are those of the own slice, e4m3; `scales` those of all squares of `block` x `block` of
    its weights, float32, weight by weight and each row by row.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int

    def scales_of(self, part: slice, num_columns: int) -> torch.Tensor:
        """Return the scales of weights of so many columns that are `part` of the bucket."""
        area = self.block**2
        return self.scales[part.start // area : part.stop // area].view(
            -1, num_columns // self.block
        )


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Hold one flat run of parameters and of their gradients."""

    plan: BucketPlan
    """Which parameters are in it."""
    values: torch.Tensor
    """All its parameters [num_elements], or their codes of 8 bits; the memory may be away."""
    gradients: torch.Tensor
    """All their gradients [num_elements], none of what is frozen; the memory may be away."""
    values_memory: TensorMemory
    """Whose memory `values` are in."""
    gradients_memory: TensorMemory
    """Whose memory `gradients` are in."""
    own: slice
    """The range that this rank updates: everything, where nothing is cut."""
    value_slice: torch.Tensor
    """The parameters in `own`: a view of the whole, or a tensor of its own where that does not
    last."""
    gradient_slice: torch.Tensor
    """The gradients in `own`, likewise."""
    adds_slices: bool = False
    """Whether gradients are summed after every microbatch and add up as slices."""
    decay_end: int = 0
    """Elements up to here take weight decay, the rest do not."""
    offload_store: OffloadStore | None = None
    """Where a slice of parameters is that is not on the device, under `values_key`; `value_slice`
    is then a view of it, for reading and writing between steps."""
    fp8: Fp8Slice | None = None
    """What is gathered, where that is not `value_slice`: codes of it."""
    int8: Int8Message | None = None
    """What is gathered where `values` are made of integers of 8 bits."""
    slots: list[Slot] = field(default_factory=list)
    """Where each parameter is."""
    missing: int = 0
    """Gradients to come before it is summed; below 1, it is not summed after this microbatch."""
    ends: bool = False
    """Whether it is then summed for the last time in this step."""

    @property
    def name(self) -> str:
        """Return the name of the bucket on this rank."""
        return self.plan.name

    @property
    def index(self) -> int:
        """Return the place of the bucket among those of this rank."""
        return int(self.name.removeprefix("bucket"))

    @property
    def values_key(self) -> str:
        """Return the key under which the slice of parameters rests."""
        return f"{self.name}.values"

    def segments(self) -> list[tuple[slice, bool]]:
        """Return the ranges of the bucket that are real, each with whether it decays."""
        end = self.slots[-1].end
        ranges = [(slice(0, self.decay_end), True), (slice(self.decay_end, end), False)]
        return [(part, decays) for part, decays in ranges if part.stop > part.start]

    def counted_ranges(self) -> list[slice]:
        """Return the ranges of the bucket that count in the global gradient norm, merged."""
        ranges: list[slice] = []
        for slot in self.slots:
            if not slot.counted:
                continue
            if ranges and ranges[-1].stop == slot.start:
                ranges[-1] = slice(ranges[-1].start, slot.end)
            else:
                ranges.append(slice(slot.start, slot.end))
        return ranges

    def within_own_slice(self, part: slice) -> slice:
        """Return where in this rank's slice a range of the bucket lies (maybe empty)."""
        length = self.own.stop - self.own.start
        start = min(max(part.start - self.own.start, 0), length)
        return slice(start, max(start, min(part.stop - self.own.start, length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlicing:
    """Say into how many slices a bucket is cut, of which this rank owns number `index`.

    `adds_slices` says that gradients of microbatches are added up as slices.
    """

    num_slices: int = 1
    index: int = 0
    adds_slices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRule:
    """Say how the buckets of a rank are cut, stored and counted (see `layout/buckets.py`)."""

    plans: Sequence[BucketPlan]
    """The buckets."""
    optimizer: Optimizer
    """The optimizer whose state they have."""
    counted: Mapping[str, bool]
    """Whether a parameter counts in the norm on this rank, by name."""
    uses: Mapping[str, int]
    """Contributions that a microbatch makes to a parameter, by name (1 where it is not named)."""
    gradients: torch.dtype
    """Dtype in which gradients add up."""
    slicing: BucketSlicing = BucketSlicing()
    """How buckets are cut."""
    expert_slicing: BucketSlicing = BucketSlicing()
    """How those of routed experts are cut."""
    offload_store: OffloadStore | None = None
    """What takes the slices of parameters that are not on the device."""
    fp8_block: int = 0
    """The side of a square of a weight that has one scale, where products are in 8 bits."""
    int8_block: int = 0
    """Numbers of a row that have one scale, where matrices are gathered in int8."""
    buffer_pool: BufferPool | None = None
    """What lends memory to what is not always whole."""


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    specs: Iterable[ParameterSpec],
    rule: BucketRule,
    like: torch.Tensor,
) -> list[Bucket]:
    """Return flat buckets for `parameters`, with the dtype and on the device of `like`.

    A parameter with values keeps them, and its identity; one on the meta device is replaced by a
    new one (`Slot.parameter`), whose values are not set.
    """
    by_name = {spec.name: spec for spec in specs}
    return [_make_bucket(parameters, by_name, plan, rule, like) for plan in rule.plans]


def _make_bucket(
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParameterSpec],
    plan: BucketPlan,
    rule: BucketRule,
    like: torch.Tensor,
) -> Bucket:
    cut = rule.expert_slicing if plan.expert else rule.slicing
    size = plan.num_elements // cut.num_slices
    own = slice(cut.index * size, (cut.index + 1) * size)
    kept_in = E4M3 if plan.fp8_squares else like.dtype
    values, values_memory = _zeros(
        plan.num_elements, kept_in, like.device, rule.buffer_pool if plan.sliced else None
    )
    adds_slices = cut.adds_slices and not plan.frozen
    gradients, gradients_memory = _zeros(
        0 if plan.frozen else plan.num_elements,
        rule.gradients,
        like.device,
        rule.buffer_pool if adds_slices else None,
    )
    bucket = Bucket(
        plan=plan,
        values=values,
        gradients=gradients,
        values_memory=values_memory,
        gradients_memory=gradients_memory,
        own=own,
        value_slice=values[own],
        gradient_slice=gradients[own],
        adds_slices=adds_slices,
    )
    start = 0
    for name in segment_order(plan.names, specs, rule.optimizer):
        end = start + parameters[name].numel()
        shape = parameters[name].shape
        slot = Slot(
            spec=specs[name],
            parameter=_moved_to_view(parameters[name], values[start:end].view(shape)),
            bucket=bucket,
            start=start,
            gradient=gradients if plan.frozen else gradients[start:end].view(shape),
            uses=rule.uses.get(name, 1),
            counted=rule.counted[name],
        )
        values_memory.add_view(slot.parameter)
        if not plan.frozen:
            gradients_memory.add_view(slot.gradient)
        bucket.slots.append(slot)
        start = end
        if decays(rule.optimizer, specs[name]):
            bucket.decay_end = end
    if plan.int8_blocks:
        bucket.int8 = _int8_message(plan, rule, like)
    if plan.fp8_squares:
        _keep_codes(bucket, rule, like.dtype)
    else:
        _keep_slices(bucket, rule)
    return bucket


def _zeros(
    num_elements: int, dtype: torch.dtype, device: torch.device, buffer_pool: BufferPool | None
) -> tuple[torch.Tensor, TensorMemory]:
    if buffer_pool is None:
        flat = torch.zeros(num_elements, dtype=dtype, device=device)
        return flat, OwnedTensorMemory(flat)
    memory = PooledTensorMemory(num_elements, dtype, buffer_pool)
    return memory.flat.zero_(), memory


def _int8_message(plan: BucketPlan, rule: BucketRule, like: torch.Tensor) -> Int8Message:
    """Return what is gathered of a bucket in int8; its memory is away."""
    size = plan.num_elements + plan.int8_blocks * at_least_fp32(like.dtype).itemsize
    whole, memory = _zeros(size, torch.uint8, like.device, rule.buffer_pool)
    memory.release()
    return Int8Message(whole=whole, memory=memory, block=rule.int8_block, dtype=like.dtype)


@torch.no_grad()
def _moved_to_view(parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
    if parameter.is_meta:
        return nn.Parameter(view, requires_grad=parameter.requires_grad)
    view.copy_(parameter)
    parameter.data = view
    return parameter


def _keep_codes(bucket: Bucket, rule: BucketRule, dtype: torch.dtype) -> None:
    """Give the slice of a bucket that is gathered in 8 bits memory, and its codes and scales."""
    codes = bucket.value_slice.clone()
    squares = (bucket.plan.fp8_squares,)
    scales = torch.ones(squares, dtype=torch.float32, device=codes.device)
    bucket.fp8 = Fp8Slice(codes=codes, scales=scales, block=rule.fp8_block)
    bucket.value_slice = torch.zeros_like(codes, dtype=dtype)
    bucket.values_memory.release()
    _keep_gradient_slice(bucket)


def _keep_slices(bucket: Bucket, rule: BucketRule) -> None:
    """Give slices a memory of their own where the whole is not kept, and take its memory away."""
    if bucket.plan.sliced:
        kept = bucket.value_slice
        if rule.offload_store is None:
            bucket.value_slice = kept.clone()
        else:
            bucket.offload_store = rule.offload_store
            bucket.offload_store.add(bucket.values_key, kept.numel(), kept.dtype)
            bucket.value_slice = bucket.offload_store.view(bucket.values_key)
            bucket.value_slice.copy_(kept)
        bucket.values_memory.release()
    _keep_gradient_slice(bucket)


def _keep_gradient_slice(bucket: Bucket) -> None:
    if bucket.adds_slices:
        bucket.gradient_slice = bucket.gradient_slice.clone()
        bucket.gradients_memory.release()


LARGEST_CODE = 127
"""The code of the largest number of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Message:
    """Message by which ranks gather a bucket of matrices in int8: a piece of each rank.

    Split: buckets of matrices, into the slices of ZeRO 3, padded so that no block is in two of
           them.
    Sent:  in place of a slice, a scale for each of its blocks and a code of 1 byte for each number,
           scales first: one all-gather of bytes, before each use (or the first of a step, with
           secondary slices).
    Bytes: `data_bytes` in `cost/bytes/data.py`.
    Must divide: int8_block, the width of a row of every matrix on a rank.
    Source: Wang et al., "ZeRO++", 2023, section 3.1 (qwZ); Dettmers et al., "8-bit Optimizers via
            Block-wise Quantization", 2022.

    Forward and backward of all ranks, the owner of a slice included, take `code x scale`, so this
    is mathematics: a block is `int8_block` neighbours of a row, wherever they lie, and no layout
    cuts one. The gradient is that of the rounded matrix; the optimizer adds it to the slice, which
    is not rounded.
    """

    whole: torch.Tensor
    """The pieces of all ranks [n x piece], bytes; the memory may be away."""
    memory: TensorMemory
    """Whose memory it is in."""
    block: int
    """Numbers that share a scale."""
    dtype: torch.dtype
    """That of the parameters."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype of scales."""
        return at_least_fp32(self.dtype)

    @torch.no_grad()
    def piece(self, values: torch.Tensor) -> torch.Tensor:
        """Return what a rank puts in of its slice: bytes of scales, then of codes."""
        blocks = values.view(-1, self.block).to(self.scale_dtype)
        scales = block_scales(blocks)
        codes = block_codes(blocks, scales)
        return torch.cat((scales.view(torch.uint8), codes.view(-1).view(torch.uint8)))

    @torch.no_grad()
    def write_values(self, values: torch.Tensor, num_pieces: int) -> None:
        """Fill a bucket [n x slice] with what has been gathered."""
        pieces = self.whole.view(num_pieces, -1)
        size = self.scale_dtype.itemsize
        num_blocks = pieces.shape[1] // (size + self.block)
        # In one dim: of a single piece the row may be no whole number of scales long.
        scales = pieces[:, : num_blocks * size].reshape(-1).view(self.scale_dtype)
        codes = pieces[:, num_blocks * size :].view(torch.int8)
        torch.mul(
            codes.unflatten(1, (num_blocks, self.block)),
            scales.view(num_pieces, num_blocks, 1),
            out=values.detach().view(num_pieces, num_blocks, self.block),
        )


def block_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row of `blocks`: its largest number over 127; 1 of zeros."""
    scales = torch.linalg.vector_norm(blocks, float("inf"), dim=1) / LARGEST_CODE
    return scales.masked_fill_(scales == 0, 1.0)


def block_codes(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes of each row; of what is not finite, the scale tells."""
    codes = (blocks / scales[:, None]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.nan_to_num_(0.0).to(torch.int8)
