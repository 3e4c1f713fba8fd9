"""Communicators of a rank, counted by hand and by the groups of meshes, and what they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.mesh import Mesh
from echelon.cost.bytes.nccl import (
    CONNECTION_BYTES,
    POOL_BYTES,
    message_peers,
    nccl_bytes,
    nccl_facts,
    num_collective_communicators,
)
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import Num
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.trainers import constants_of_trainer, our_constants
from tests.cost.seconds.small_work import MACHINE, MIXTURE, MODEL, small_work, with_trainer


def plain(value: Num) -> float:
    """Return the number of one plan."""
    return float(np.asarray(value))


def counts(work: CostInputs) -> tuple[float, float, float]:
    """Return collective communicators, peers on the node, and pools for others."""
    near, pools = message_peers(work)
    return plain(num_collective_communicators(work)), plain(near), plain(pools)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, (0, 0, 0)),
        ({"dp_shard": 4.0, "zero": 3.0}, (1, 0, 0)),
        ({"dp_shard": 8.0, "zero": 3.0}, (1, 0, 0)),
        ({"dp_replicate": 2.0, "dp_shard": 2.0, "zero": 1.0}, (3, 0, 0)),
        ({"tp": 2.0, "dp_shard": 2.0, "zero": 1.0}, (3, 0, 0)),
        # Activations and gradients to the one neighbour, which is on the node, or is not.
        ({"pp": 2.0}, (1, 2, 0)),
        ({"pp": 2.0, "dp_shard": 4.0}, (2, 0, 2)),
        ({"pp": 4.0}, (1, 4, 0)),
        ({"cp": 4.0}, (1, 2, 0)),
        ({"cp": 4.0, "gathered": 1.0}, (1, 0, 0)),
        ({"cp": 4.0, "ulysses": 4.0}, (1, 3, 0)),
        ({"cp": 4.0, "ulysses": 2.0}, (3, 2, 0)),
        # Four tensor ranks fill a node: the others of a ring are elsewhere.
        ({"cp": 2.0, "tp": 4.0}, (3, 0, 1)),
    ],
)
def test_communicators_are_those_of_different_ranks(
    layout: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert counts(small_work(**layout)) == expected


def test_experts_have_links_to_all_their_peers() -> None:
    there = counts(small_work(model=MIXTURE, dp_shard=4.0, ep=4.0))
    assert there == (2, 3, 0)
    over_nodes = counts(small_work(model=MIXTURE, dp_shard=8.0, ep=8.0))
    assert over_nodes == (2, 3, 1)


def test_the_ends_of_a_tied_pipeline_have_one_of_their_own() -> None:
    tied = replace(MODEL, tied=1.0)
    assert counts(small_work(model=tied, pp=2.0))[0] == counts(small_work(pp=2.0))[0] + 1


@pytest.mark.parametrize("dp_replicate", [1, 2])
@pytest.mark.parametrize("dp_shard", [1, 3])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_counts_are_those_of_the_groups_of_a_mesh(
    dp_replicate: int, dp_shard: int, cp: int, tp: int, pp: int
) -> None:
    degrees: dict[str, Any] = {
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "cp": cp,
        "tp": tp,
        "pp": pp,
    }
    mesh = Mesh(**degrees)
    axes = [
        MESH_AXES,
        LOSS_AXES,
        SHARD_AXES,
        (Axis.DP_REPLICATE,),
        (Axis.TP,),
        (Axis.CP,),
    ]
    mine = {ranks for one in axes for ranks in mesh.groups(*one) if 0 in ranks and len(ranks) > 1}
    numbers: dict[str, Any] = {name: float(degree) for name, degree in degrees.items()}
    work = small_work(**numbers, zero=1.0, gathered=1.0)
    assert counts(work)[0] == len(mine)


def test_bytes_are_those_of_connections_and_pools() -> None:
    facts = {"connection_bytes": 32.0 * CONNECTION_BYTES, "pool_bytes": float(POOL_BYTES)}
    work = with_trainer(small_work(model=MIXTURE, dp_shard=8.0, ep=8.0), **facts)
    expected = (2 + 3) * facts["connection_bytes"] + POOL_BYTES
    assert nccl_bytes(work) == expected
    assert fullest_rank_bytes(work).terms["nccl"] == expected
    lattice = with_trainer(small_work(dp_shard=np.array([1.0, 4.0]), zero=3.0), **facts)
    found = np.asarray(fullest_rank_bytes(lattice).terms["nccl"])
    assert found.tolist() == [0.0, facts["connection_bytes"]]


def test_an_all_to_all_on_a_node_takes_what_was_seen_of_it() -> None:
    """Of 8 H100: 4.34 - 1.06 GB (NVIDIA/nccl, issue 1685)."""
    layout = small_work(model=MIXTURE, machine=replace(MACHINE, node=8.0), dp_shard=8.0, ep=8.0)
    near, pools = message_peers(layout)
    facts = nccl_facts(read_typed_cluster("8xh100", "a test"))
    assert plain(pools) == 0.0
    assert plain(near) * facts["connection_bytes"] == pytest.approx(3.28e9, rel=0.01)


def test_it_is_told_apart_of_our_trainer_on_gpus_only() -> None:
    on_gpus, on_processors = (
        read_typed_cluster("8xh100", "a test"),
        read_typed_cluster("4xcpu", "a test"),
    )
    assert float(our_constants(on_gpus).connection_bytes) == 32.0 * CONNECTION_BYTES
    assert float(our_constants(on_gpus).context_bytes) == 0.5e9
    assert float(our_constants(on_processors).connection_bytes) == 0.0
    assert float(constants_of_trainer("megatron-core", on_gpus).connection_bytes) == 0.0
    assert "nccl" not in fullest_rank_bytes(small_work()).terms
    slow = replace(on_gpus, links=tuple(replace(one, bandwidth=3e10) for one in on_gpus.links))
    assert nccl_facts(slow)["connection_bytes"] == 4.0 * CONNECTION_BYTES
