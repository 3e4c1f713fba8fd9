"""Places in a bucket: one after the other, and shared out over its slices."""

from __future__ import annotations

from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.slots import slice_parts, slot_ranges
from echelon.layout.stage import held_parameters, rank_part
from tests.cost.layouts import zero_plan
from tests.parallel.layouts import QWEN


def test_slots_lie_one_after_the_other_and_slices_share_them_out() -> None:
    plan = zero_plan(1, dp_shard=4, tp=2, model=QWEN)
    part = rank_part(plan, 0)
    specs = {spec.name: spec for spec in held_parameters(plan, part)}
    for bucket in plan_buckets(plan, part):
        slots, size = slot_ranges(plan, bucket, specs), slice_elements(plan, bucket)
        assert {slot.spec.name for slot in slots} == set(bucket.names)
        assert [slot.start for slot in slots] == [0, *(slot.stop for slot in slots[:-1])]
        assert slots[-1].stop <= bucket.num_elements
        for slot in slots:
            parts = slice_parts(plan, bucket, slot)
            assert [one.start for one in parts] == [0, *(one.stop for one in parts[:-1])]
            assert parts[-1].stop == slot.stop - slot.start
            for one in parts:
                assert one.bucket_start == slot.start + one.start
                assert one.index * size <= one.bucket_start
                assert one.bucket_start + one.stop - one.start <= (one.index + 1) * size
