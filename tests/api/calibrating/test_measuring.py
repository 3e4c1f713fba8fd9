"""Each measurement is made once, on the ranks that a run would have, in groups as it has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.api.calibrating.measuring import JOB_TIMEOUT_S, Measuring
from echelon.api.calibrating.place import MeasuredPlace
from echelon.config.files.measurements import (
    UnfinishedMeasurements,
    measurement_name,
    unfinished_measurements,
)
from echelon.cost.fit.device import UnfittedDevice
from tests.cost.fit.tiny_workload import TINY

CORE = UnfittedDevice(name="core", memory_bytes=1, dtype="fp32", asynchronous=False)
PLACE = MeasuredPlace(machine=CORE, ranks=2, threads=1, backend="gloo", dtype="fp32")
WORK = replace(TINY, held_out=frozenset(TINY.matmuls[:1]), held_out_sizes=frozenset(TINY.sizes[:1]))


class _Ranks:
    """Stand for ranks: every job takes a second for each of its items, and is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []

    def run(
        self, target: object, argument: Any = None, world_size: int = 1, *, timeout_s: float = 0.0
    ) -> list[Any]:
        assert timeout_s == JOB_TIMEOUT_S
        self.asked.append((argument, world_size))
        items = getattr(argument, "kernels", None) or argument.collectives
        return [[float(number + 1) for number in range(len(items))]] * world_size


@pytest.fixture
def done(tmp_path: Path) -> Iterator[UnfinishedMeasurements]:
    with unfinished_measurements(tmp_path / "cluster.toml", {}) as measurements:
        yield measurements


def _measuring(ranks: _Ranks, done: UnfinishedMeasurements, place: MeasuredPlace) -> Measuring:
    return Measuring(ranks=ranks, place=place, workload=WORK, done=done, say=lambda _: None)


def test_kernels_run_on_all_ranks_of_all_nodes_and_some_alone(
    done: UnfinishedMeasurements,
) -> None:
    ranks = _Ranks()
    timed = _measuring(ranks, done, replace(PLACE, nodes=3)).kernels()
    assert [(job.running, world) for job, world in ranks.asked] == [(1, 1), (2, 6)]
    assert [one.kernel for one in timed if one.running == 2] == [*WORK.kernels]
    assert {one.kernel for one in timed if not one.fitted} == WORK.held_out
    assert ranks.asked[1][0].journal == done.journal


def test_the_share_of_a_core_is_taken_out(done: UnfinishedMeasurements) -> None:
    ranks = _Ranks()
    place = replace(PLACE, ranks=4, machine=replace(CORE, cores=2.0))
    timed = _measuring(ranks, done, place).kernels()
    assert [world for _, world in ranks.asked] == [4]
    assert [one.seconds for one in timed[:2]] == [2.0, 4.0]


def test_what_was_measured_before_is_taken(done: UnfinishedMeasurements) -> None:
    ranks = _Ranks()
    first = WORK.kernels[0]
    kept = {measurement_name(first, running=2): 7.0}
    kept |= {measurement_name(one, running=1): 9.0 for one in WORK.matmuls}
    timed = _measuring(ranks, replace(done, found=kept), PLACE).kernels()
    assert [len(job.kernels) for job, _ in ranks.asked] == [len(WORK.kernels) - 1]
    assert {one.seconds for one in timed if one.running == 1} == {9.0}
    assert [one.seconds for one in timed if one.running == 2][:2] == [7.0, 1.0]


def test_one_rank_has_no_collectives(done: UnfinishedMeasurements) -> None:
    ranks = _Ranks()
    assert _measuring(ranks, done, replace(PLACE, ranks=1)).collectives() == ([], [])
    assert ranks.asked == []


def test_links_are_measured_by_size_and_group_in_a_node_and_between_nodes(
    done: UnfinishedMeasurements,
) -> None:
    ranks = _Ranks()
    place = replace(PLACE, ranks=4, nodes=3)
    inside, between = _measuring(ranks, done, place).collectives()
    assert [world for _, world in ranks.asked] == [12]
    groups = {(one.collective.degree, one.collective.stride) for one in inside}
    assert groups == {(2, 1), (4, 1)}
    groups = {(one.collective.degree, one.collective.stride) for one in between}
    assert groups == {(2, 4), (8, 1), (3, 4), (12, 1)}
    assert {one.collective.num_bytes for one in between} == set(WORK.sizes)
    # Neighbours of whole nodes are in one of them: a message says nothing of the network.
    sends = {one.collective.stride for one in between if one.collective.kind == "send"}
    assert sends == {4}
    held_out = {one.collective.num_bytes for one in (*inside, *between) if not one.fitted}
    assert held_out == WORK.held_out_sizes


def test_nodes_of_one_rank_have_a_network_only(done: UnfinishedMeasurements) -> None:
    inside, between = _measuring(_Ranks(), done, replace(PLACE, ranks=1, nodes=2)).collectives()
    assert inside == []
    assert {(one.collective.degree, one.collective.stride) for one in between} == {(2, 1)}
    assert "send" in {one.collective.kind for one in between}


def test_collectives_that_were_measured_before_are_taken(done: UnfinishedMeasurements) -> None:
    ranks = _Ranks()
    inside, _ = _measuring(ranks, done, PLACE).collectives()
    kept = {measurement_name(one.collective): 5.0 for one in inside}
    again, _ = _measuring(ranks, replace(done, found=kept), PLACE).collectives()
    assert len(ranks.asked) == 1
    assert {one.seconds for one in again} == {5.0}
