"""Codes of outer gradients are off by no more than is stated, and are those of the oracle.

Evidence of row B06: the error bounds of int8 and fp8.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.choices.local_sgd import OUTER_BLOCK, LocalSgd, OuterGradients
from echelon.core.event import NoEvents
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.layout.islands import blocks_in_stage
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.oracle.local_sgd import as_sent
from echelon.training.local_sgd.quantised import LARGEST, QuantisedGradients
from tests.parallel.layouts import NANO, plan_of

KINDS: tuple[OuterGradients, ...] = ("int8", "fp8")
WIDE: ModelShape = replace(NANO, hidden=144, ffn=300)
"""Rows of 144 and 300 numbers: blocks of 128, and of 16 and 44."""


def alone(kind: OuterGradients) -> Plan:
    """Return the plan of one island, which meets itself."""
    plan = plan_of(model=WIDE)
    return replace(
        plan,
        mathematics=replace(plan.mathematics, local_sgd=LocalSgd(every=2, gradients=kind)),
    )


def met(kind: OuterGradients) -> list[tuple[Bucket, torch.Tensor, torch.Tensor]]:
    """Return, for each bucket, what was moved and what codes say of it."""
    plan = alone(kind)
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    buckets = apply_plan(plan, groups, torch.device("cpu")).buckets
    local = plan.mathematics.local_sgd
    quantised = QuantisedGradients(local, buckets, groups, [blocks_in_stage(plan, 0, 0)])
    generator = torch.Generator().manual_seed(1)
    moved = {one.name: torch.zeros_like(one.value_slice) for one in buckets}
    for one in buckets:
        numbers = torch.randn(one.slots[-1].end, generator=generator, dtype=torch.float64)
        # Numbers of very unequal size, and none in places.
        moved[one.name][: one.slots[-1].end] = numbers**5 * (numbers > -0.5)
    kept = {name: flat.clone() for name, flat in moved.items()}
    most = quantised.largest_numbers(0, moved, moved[buckets[0].name])
    for one in buckets:
        quantised.mean(one, 0, moved[one.name], most)
    return [(one, kept[one.name], moved[one.name]) for one in buckets]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_off_by_no_more_than_their_bound(kind: OuterGradients) -> None:
    worst = 0.0
    for bucket, moved, coded in met(kind):
        for slot in bucket.slots:
            part = slice(slot.start, slot.end)
            rows = [flat[part].view(-1, slot.spec.shape[-1]) for flat in (moved, coded)]
            for x, y in zip(*(one.split(OUTER_BLOCK, dim=1) for one in rows), strict=True):
                scale = x.abs().amax(dim=1, keepdim=True) / LARGEST[kind]
                bound = scale / 2
                if kind == "fp8":
                    bound = torch.maximum(x.abs() / 16, scale / 1024)
                off = (x - y).abs()
                # What dividing by a scale and multiplying by it again rounds.
                assert bool((off <= bound * (1 + 1e-6) + 1e-15 * x.abs()).all())
                worst = max(worst, float((off / bound.clamp_min(1e-300)).max()))
                assert bool((y[x == 0] == 0).all())
    assert worst > 0.9, "the bound is met, not only kept"


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_oracle(kind: OuterGradients) -> None:
    local = LocalSgd(every=2, gradients=kind)
    for bucket, moved, coded in met(kind):
        for slot in bucket.slots:
            part = slice(slot.start, slot.end)
            right = as_sent(local, moved[part].view(slot.spec.shape))
            torch.testing.assert_close(
                coded[part].view(slot.spec.shape), right, rtol=1e-14, atol=0.0
            )
