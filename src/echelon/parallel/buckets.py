"""Flat buckets: where parameters and gradients live.

The parameters of a rank are laid out in a few flat tensors, and their gradients in others of the
same layout; a parameter and its gradient are views. So a bucket is one collective with no copy in
or out and one fused optimizer call, and matrices that read the same input (q, k, v; gate, up) lie
side by side and are one matrix product. Buckets are filled in the reverse order of the forward
pass, which is the order in which backward completes them (Li et al., "PyTorch Distributed", 2020,
section 3.2.3). Each is padded to a multiple of the data-parallel degree, so that cutting it into
equal slices (ZeRO) needs no other layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.cost.buckets import BucketPlan, segment_order
from echelon.parallel.collectives import Group


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


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Hold one flat run of parameters and of their gradients.

    Elements up to `decay_end` take weight decay, the rest (biases, norms) do not. `reductions` are
    the groups that the gradient is summed over, in order; only a bucket with a single one is
    reduced while backward still runs.
    """

    name: str
    values: torch.Tensor
    gradients: torch.Tensor
    decay_end: int
    reductions: tuple[Group, ...]
    slots: list[Slot] = field(default_factory=list)
    missing: int = 0

    def segments(self) -> list[tuple[slice, bool]]:
        """Return the ranges that the optimizer updates, each with whether it decays."""
        end = self.slots[-1].end
        ranges = [(slice(0, self.decay_end), True), (slice(self.decay_end, end), False)]
        return [(part, decays) for part, decays in ranges if part.stop > part.start]

    def counted_ranges(self) -> list[slice]:
        """Return the ranges that this rank adds to the global gradient norm, merged."""
        ranges: list[slice] = []
        for slot in self.slots:
            if not slot.counted:
                continue
            if ranges and ranges[-1].stop == slot.start:
                ranges[-1] = slice(ranges[-1].start, slot.end)
            else:
                ranges.append(slice(slot.start, slot.end))
        return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRule:
    """Say how the buckets of a rank are cut and reduced (see `cost.buckets`)."""

    plans: Sequence[BucketPlan]
    reductions: dict[str, tuple[Group, ...]]
    counted: dict[str, bool]
    uses: dict[str, int]


def make_buckets(
    parameters: dict[str, nn.Parameter], specs: Iterable[ParameterSpec], rule: BucketRule
) -> list[Bucket]:
    """Move `parameters` into flat buckets and give each a gradient view; values are kept."""
    by_name = {spec.name: spec for spec in specs}
    return [_make_bucket(parameters, by_name, plan, rule) for plan in rule.plans]


def _make_bucket(
    parameters: dict[str, nn.Parameter],
    specs: dict[str, ParameterSpec],
    plan: BucketPlan,
    rule: BucketRule,
) -> Bucket:
    names = segment_order(plan.names, specs)
    like = parameters[names[0]]
    values = like.new_zeros(plan.num_elements)
    bucket = Bucket(
        name=plan.name,
        values=values,
        gradients=torch.zeros_like(values),
        decay_end=0,
        reductions=rule.reductions[plan.kind],
    )
    start = 0
    for name in names:
        parameter = parameters[name]
        end = start + parameter.numel()
        with torch.no_grad():
            values[start:end].copy_(parameter.detach().reshape(-1))
        parameter.data = values[start:end].view_as(parameter)
        bucket.slots.append(
            Slot(
                spec=specs[name],
                parameter=parameter,
                bucket=bucket,
                start=start,
                gradient=bucket.gradients[start:end].view_as(parameter),
                uses=rule.uses.get(name, 1),
                counted=rule.counted[name],
            )
        )
        start = end
        if specs[name].decays:
            bucket.decay_end = end
    return bucket
