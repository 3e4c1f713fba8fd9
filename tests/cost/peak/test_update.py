"""What an update has beside the model state."""

from __future__ import annotations

from math import prod

from echelon.config.load import load_job
from echelon.core.disk import round_up_to_pages
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import Plan
from echelon.cost.peak.update import (
    NORM_ELEMENTS,
    UPDATE_ELEMENTS,
    most_update_bytes,
    offload_buffer_bytes,
)
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import part_of

MUON = "optimizer.kind=muon"


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def most(plan: Plan) -> int:
    return most_update_bytes(plan, 0, plan_buckets(plan, part_of(plan, 0)))


def test_an_update_in_place_has_nothing() -> None:
    assert most(plan_of()) == 0


def test_gradients_in_few_digits_are_cast_piece_by_piece() -> None:
    low = ("precision.parameters=bf16", "precision.gradients=bf16")
    plan = plan_of(*low, "mesh.dp_shard=2", "zero.stage=1")
    buckets = plan_buckets(plan, part_of(plan, 0))
    assert most(plan) == 4 * max(slice_elements(plan, one) for one in buckets)
    assert TRAINING_PIECES.gpu_update_elements == UPDATE_ELEMENTS


def test_an_update_in_one_pass_casts_nothing() -> None:
    flags = ("precision.parameters=bf16", "precision.gradients=bf16", "cluster.preset=1xh100")
    assert most(plan_of(*flags)) == 0
    buckets = plan_buckets(plan_of(*flags), part_of(plan_of(*flags), 0))
    longest = max(one.num_elements for one in buckets)
    assert most(plan_of(*flags, 'kernels.fused=["norm"]')) == 4 * longest


def test_a_cpu_widens_a_run_of_gradients_for_the_norm() -> None:
    low = [f"precision.{one}=bf16" for one in ("parameters", "gradients", "master")]
    plan = plan_of(*low)
    buckets = plan_buckets(plan, part_of(plan, 0))
    assert TRAINING_PIECES.norm_elements == NORM_ELEMENTS
    assert most(plan) == 4 * min(NORM_ELEMENTS, max(one.num_elements for one in buckets))
    assert most(plan_of(*low, "cluster.preset=1xh100")) == 0


def test_muon_alone_has_its_matrices_and_one_iteration() -> None:
    plan = plan_of(MUON)
    matrices = muon_exchange(plan, 0).owned(0)
    every = sum(prod(one.shape) for one in matrices)
    iteration = max(2 * prod(one.shape) + 2 * min(one.shape) ** 2 for one in matrices)
    assert most(plan) == 4 * (every + iteration)


def test_over_data_ranks_pieces_and_results_travel_beside() -> None:
    alone, shared = plan_of(MUON), plan_of(MUON, "mesh.dp_shard=2", "zero.stage=1")
    assert 0 < most(shared) != most(alone)


def offloaded_plan(*flags: str) -> Plan:
    gpus = ("cluster.preset=8xh100", "mesh.dp_shard=2", "zero.stage=3", "mesh.dp_replicate=4")
    return load_job("nano", (*gpus, "precision.parameters=fp32", *flags)).plan


def found(plan: Plan, reads: int = 0) -> int:
    return offload_buffer_bytes(plan, plan_buckets(plan, part_of(plan, 0)), reads, {"device"})


def test_two_jobs_of_an_update_are_at_hand() -> None:
    plan = offloaded_plan("zero.optimizer_offload=host")
    slices = [slice_elements(plan, one) for one in plan_buckets(plan, part_of(plan, 0))]
    # AdamW has two moments of each; the master copy is the parameters themselves.
    assert found(plan) == 2 * 2 * round_up_to_pages(4 * max(slices))
    assert found(offloaded_plan()) == 0


def test_slices_of_parameters_have_a_buffer_each_while_they_are_read() -> None:
    flags = ("zero.parameter_offload=host", "zero.optimizer_offload=host")
    plan = offloaded_plan(*flags)
    slices = [slice_elements(plan, one) for one in plan_buckets(plan, part_of(plan, 0))]
    each = round_up_to_pages(4 * max(slices))
    assert found(plan, 3) - found(offloaded_plan("zero.optimizer_offload=host")) == 3 * each
    # An update has two of them at hand, however few a step reads.
    assert found(plan, 0) - found(offloaded_plan("zero.optimizer_offload=host")) == 2 * each
