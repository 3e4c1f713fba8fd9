"""The highest moment of a rank: its terms, where it is, and that no term alone is more."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan, Precision
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.peak.rank_peak import (
    TERMS,
    PeakWalk,
    memory_by_place,
    position_table_bytes,
    resting_terms,
    server_peak_buffers,
)
from echelon.layout.slots import plan_server_ranges
from tests.parallel.servers.test_server import served_plan

STATE = ("parameters", "gradients", "optimizer")
ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


@pytest.mark.parametrize("flags", [(), ("mesh.pp=2",), ZERO3, ("mesh.pp=2", *ZERO3)])
def test_terms_are_model_state_and_what_a_step_adds(flags: tuple[str, ...]) -> None:
    plan = plan_of(*flags)
    for one in PeakWalk(plan).by_place():
        resting = resting_terms(plan, one.rank)
        assert tuple(one.terms) == TERMS
        assert {name: one.terms[name] for name in STATE} == {name: resting[name] for name in STATE}
        assert sum(resting[name] for name in STATE) == bytes_held_by_pool(plan, one.rank)["device"]
        activations = max(
            float(action.peak) for action in RankActivations(plan, one.rank).actions()
        )
        assert 0 < one.terms["activations"] <= activations
        assert one.bytes == sum(one.terms.values())


def test_without_anything_else_the_peak_is_that_of_activations() -> None:
    plan = plan_of()
    peak = PeakWalk(plan).peak(0)
    tokens = 16 * plan.local_tokens * plan.num_microbatches
    walked = max(float(action.peak) for action in RankActivations(plan, 0).actions())
    assert peak.terms["activations"] == walked
    assert peak.terms["buffers"] == tokens + position_table_bytes(plan)
    assert peak.terms["gathered"] == peak.terms["messages"] == 0
    # Of the rounds that are walked the last microbatch is the highest: the others leave a loss.
    assert peak.where == "BW0.3, layers.3, activation"


def test_positions_of_a_context_rank_have_a_cosine_and_a_sine() -> None:
    plan, cut = plan_of(), plan_of("mesh.cp=2")
    width, length = plan.model.head_dim, plan.mathematics.sequence_length
    assert position_table_bytes(plan) == length * width * 4
    assert position_table_bytes(cut) == length * width * 2
    assert position_table_bytes(plan_of("model.positions=learned")) == 0


def test_a_longer_step_has_its_losses_and_its_tokens_more() -> None:
    few, many = (
        plan_of("mesh.pp=2", f"batch.global_sequences={count}", "batch.microbatch_sequences=1")
        for count in (12, 48)
    )
    rank = few.mesh.rank({Axis.PP: 1})
    short, long = PeakWalk(few).peak(rank), PeakWalk(many).peak(rank)
    assert long.terms["buffers"] - short.terms["buffers"] == 36 * 16 * few.local_tokens
    assert long.terms["activations"] - short.terms["activations"] == 36 * 4
    for name in ("messages", "gathered", *STATE):
        assert long.terms[name] == short.terms[name]


def test_an_update_may_be_the_peak() -> None:
    flags = ("optimizer.kind=muon", "batch.sequence_length=8", "batch.microbatch_sequences=1")
    peak = PeakWalk(plan_of(*flags)).peak(0)
    assert peak.where == "update"
    assert peak.terms["activations"] == 0
    assert peak.terms["buffers"] > 0


def test_three_buckets_of_all_workers_arrive_at_a_time() -> None:
    """S06: W x the largest three ranges in a row, in the dtype of the reduction."""
    plan = served_plan(4, 2)
    sizes = [len(ranges[0]) for ranges in plan_server_ranges(plan)]
    widest = max(sum(sizes[place : place + 3]) for place in range(len(sizes)))

    found, where = server_peak_buffers(plan, 4)

    assert (found, where) == (4 * widest * 8, "the sums of gradients")


def test_a_server_holds_optimizer_state_and_workers_none() -> None:
    """S06: terms of the peak of each."""
    plan = served_plan(2, 2, precision=Precision(parameters="bf16"))
    walk = PeakWalk(plan)

    worker, server = walk.peak(0).terms, walk.peak(2).terms

    assert worker["optimizer"] == 0
    assert server["optimizer"] == 3 * server["gradients"] == 6 * server["parameters"]
    assert server["activations"] == 0
    assert [one.rank for one in walk.by_place()] == [0, 2]


FOUR_STAGES = ("mesh.pp=4", "mesh.dp_replicate=2")


@pytest.mark.parametrize(
    "settings",
    [
        FOUR_STAGES,
        ("mesh.dp_shard=4", "zero.stage=3", "zero.optimizer_offload=host"),
        ("mesh.dp_replicate=2", "servers.count=1"),
        ("mesh.dp_replicate=2", "local_sgd.every=5"),
    ],
    ids=["stages", "offload", "servers", "islands"],
)
def test_cpu_ranks_take_their_planned_peaks_of_the_host(settings: tuple[str, ...]) -> None:
    plan = load_job("nano", settings).plan
    ranks = range(plan.mesh.world_size)
    places = memory_by_place(plan, ranks)
    assert sum(place.num_ranks for place in places) == len(ranks)
    planned = sum(PeakWalk(plan).peak(rank).bytes for rank in ranks)
    assert sum(place.num_ranks * place.host_bytes for place in places) == pytest.approx(planned)
    assert all(place.device_bytes == 0 for place in places)


def test_ranks_of_another_host_do_not_count() -> None:
    plan = load_job("nano", FOUR_STAGES).plan
    # Stages are outermost: the first four ranks are those of the first two.
    first = memory_by_place(plan, range(4))
    assert [place.num_ranks for place in first] == [2, 2]
    peaks = [PeakWalk(plan).peak(rank).bytes for rank in (0, 2)]
    assert [place.host_bytes for place in first] == pytest.approx(peaks)


def test_what_gpus_offload_is_memory_of_their_host() -> None:
    kept = load_job("llama3-8b-zero3").plan
    (place,) = memory_by_place(kept, range(8))
    assert (place.num_ranks, place.host_bytes) == (8, 0)
    assert place.device_bytes == pytest.approx(PeakWalk(kept).peak(0).bytes)
    plan = load_job("llama3-8b-zero3", ["zero.optimizer_offload=host"]).plan
    (place,) = memory_by_place(plan, range(8))
    assert place.host_bytes == bytes_held_by_pool(plan, 0)["host"]
    assert place.device_bytes < PeakWalk(kept).peak(0).bytes


def test_buffers_between_gpus_and_files_are_memory_of_the_host(tmp_path: object) -> None:
    sets = ["zero.optimizer_offload=nvme", f"zero.offload_dir={tmp_path}"]
    (place,) = memory_by_place(load_job("llama3-8b-zero3", sets).plan, range(8))
    assert [*place.host] == ["buffers"]
