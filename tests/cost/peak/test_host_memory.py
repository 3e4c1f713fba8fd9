"""Peaks of the ranks of one host, by place of the pipeline; offloaded state is memory of a host."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.peak.host_memory import memory_by_place
from echelon.cost.peak.rank_peak import rank_peak

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
    planned = sum(rank_peak(plan, rank).bytes for rank in ranks)
    assert sum(place.num_ranks * place.host_bytes for place in places) == pytest.approx(planned)
    assert all(place.device_bytes == 0 for place in places)


def test_ranks_of_another_host_do_not_count() -> None:
    plan = load_job("nano", FOUR_STAGES).plan
    # Stages are outermost: the first four ranks are those of the first two.
    first = memory_by_place(plan, range(4))
    assert [place.num_ranks for place in first] == [2, 2]
    peaks = [rank_peak(plan, rank).bytes for rank in (0, 2)]
    assert [place.host_bytes for place in first] == pytest.approx(peaks)


def test_what_gpus_offload_is_memory_of_their_host() -> None:
    kept = load_job("llama3-8b-zero3").plan
    (place,) = memory_by_place(kept, range(8))
    assert (place.num_ranks, place.host_bytes) == (8, 0)
    assert place.device_bytes == pytest.approx(rank_peak(kept, 0).bytes)
    plan = load_job("llama3-8b-zero3", ["zero.optimizer_offload=host"]).plan
    (place,) = memory_by_place(plan, range(8))
    assert place.host_bytes == bytes_held_by_pool(plan, 0)["host"]
    assert place.device_bytes < rank_peak(kept, 0).bytes


def test_buffers_between_gpus_and_files_are_memory_of_the_host(tmp_path: object) -> None:
    sets = ["zero.optimizer_offload=nvme", f"zero.offload_dir={tmp_path}"]
    (place,) = memory_by_place(load_job("llama3-8b-zero3", sets).plan, range(8))
    assert [*place.host] == ["buffers"]
