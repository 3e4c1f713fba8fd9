"""Buffers of offloaded tensors: as many as are in use, each as large as the largest set."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.offload_file import round_up_to_pages
from echelon.core.plan import Plan
from echelon.cost.peak.offload_buffers import offload_buffer_bytes
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.stage import part_of


def plan_of(*flags: str) -> Plan:
    gpus = ("cluster.preset=8xh100", "mesh.dp_shard=2", "zero.stage=3", "mesh.dp_replicate=4")
    return load_job("nano", (*gpus, "precision.parameters=fp32", *flags)).plan


def found(plan: Plan, reads: int = 0) -> int:
    return offload_buffer_bytes(plan, plan_buckets(plan, part_of(plan, 0)), reads, {"device"})


def test_two_jobs_of_an_update_are_at_hand() -> None:
    plan = plan_of("zero.optimizer_offload=host")
    slices = [slice_elements(plan, one) for one in plan_buckets(plan, part_of(plan, 0))]
    # AdamW has two moments of each; the master copy is the parameters themselves.
    assert found(plan) == 2 * 2 * round_up_to_pages(4 * max(slices))
    assert found(plan_of()) == 0


def test_slices_of_parameters_have_a_buffer_each_while_they_are_read() -> None:
    flags = ("zero.parameter_offload=host", "zero.optimizer_offload=host")
    plan = plan_of(*flags)
    slices = [slice_elements(plan, one) for one in plan_buckets(plan, part_of(plan, 0))]
    each = round_up_to_pages(4 * max(slices))
    assert found(plan, 3) - found(plan_of("zero.optimizer_offload=host")) == 3 * each
    # An update has two of them at hand, however few a step reads.
    assert found(plan, 0) - found(plan_of("zero.optimizer_offload=host")) == 2 * each
