"""Ranks, coordinates and groups: a bijection, partitions, and the exact lists of known clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echelon.core.axis import DATA_AXES, LOSS_AXES, MESH_AXES, Axis
from echelon.core.mesh import Mesh
from tests.walks import examples

DEGREES = st.integers(1, 3)
MESHES = st.builds(Mesh, pp=DEGREES, dp_replicate=DEGREES, dp_shard=DEGREES, cp=DEGREES, tp=DEGREES)
AXES = st.sets(st.sampled_from(MESH_AXES)).map(tuple)


@pytest.mark.system("S38")
@given(MESHES)
@settings(deadline=None, max_examples=examples(30))
def test_ranks_and_coordinates_are_a_bijection(mesh: Mesh) -> None:
    seen: set[tuple[int, ...]] = set()
    for rank in range(mesh.world_size):
        here = mesh.coordinates(rank)
        assert tuple(here) == MESH_AXES
        assert all(0 <= here[axis] < mesh.degree(axis) for axis in MESH_AXES)
        assert mesh.rank(here) == rank
        seen.add(tuple(here.values()))
    assert len(seen) == mesh.world_size


@pytest.mark.system("S38")
@given(MESHES, AXES)
@settings(deadline=None, max_examples=examples(30))
def test_groups_partition_the_ranks(mesh: Mesh, axes: tuple[Axis, ...]) -> None:
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.degree(*axes)
        assert list(group) == sorted(group)
        fixed = [{a: c for a, c in mesh.coordinates(r).items() if a not in axes} for r in group]
        assert all(one == fixed[0] for one in fixed)
        assert all(mesh.group(rank, *axes) == group for rank in group)


@given(MESHES, st.data())
@settings(deadline=None, max_examples=examples(30))
def test_groups_over_disjoint_axes_meet_in_one_rank(mesh: Mesh, data: st.DataObject) -> None:
    first = data.draw(AXES)
    second = tuple(axis for axis in data.draw(AXES) if axis not in first)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    assert set(mesh.group(rank, *first)) & set(mesh.group(rank, *second)) == {rank}


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    mesh = Mesh(tp=2, pp=2)
    for rank in (-1, 4):
        with pytest.raises(IndexError, match=f"rank {rank} is outside a mesh of 4 ranks"):
            mesh.coordinates(rank)


def test_coordinates_that_are_left_out_are_zero() -> None:
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    assert mesh.rank({}) == 0
    assert mesh.rank({Axis.TP: 1}) == 1
    assert mesh.rank({Axis.PP: 1}) == 4


def test_the_two_by_two_by_two_cube() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, tp=2)
    assert [mesh.label(rank) for rank in range(8)] == [
        "pp0 dp_replicate0 tp0",
        "pp0 dp_replicate0 tp1",
        "pp0 dp_replicate1 tp0",
        "pp0 dp_replicate1 tp1",
        "pp1 dp_replicate0 tp0",
        "pp1 dp_replicate0 tp1",
        "pp1 dp_replicate1 tp0",
        "pp1 dp_replicate1 tp1",
    ]
    assert mesh.groups(Axis.TP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(*DATA_AXES) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(Axis.PP) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_two_by_four_by_two_is_row_major_with_tp_innermost() -> None:
    # The published figure names the outer axis dp and the middle one pp: rank = dp*8 + pp*4 + tp.
    # Ours (and Megatron's default) has pp outside of dp; the arithmetic is the same.
    mesh = Mesh(pp=2, dp_replicate=2, tp=4)
    outer_middle_inner = {
        rank: tuple(mesh.coordinates(rank)[a] for a in (Axis.PP, Axis.DP_REPLICATE, Axis.TP))
        for rank in (4, 8, 15)
    }
    assert outer_middle_inner == {4: (0, 1, 0), 8: (1, 0, 0), 15: (1, 1, 3)}
    assert mesh.label(15) == "pp1 dp_replicate1 tp3"


def test_one_rank_has_a_label_too() -> None:
    assert Mesh().label(0) == "only rank"


@pytest.mark.parametrize(
    ("dp", "world", "num_tp", "num_pp", "num_dp"), [(2, 64, 8, 16, 32), (16, 512, 64, 128, 32)]
)
def test_data_groups_hold_equal_tp_and_pp_only(
    dp: int, world: int, num_tp: int, num_pp: int, num_dp: int
) -> None:
    mesh = Mesh(tp=8, pp=4, dp_replicate=dp)
    assert mesh.world_size == world
    tensor, pipe, data = mesh.groups(Axis.TP), mesh.groups(Axis.PP), mesh.groups(*DATA_AXES)
    assert (len(tensor), len(pipe), len(data)) == (num_tp, num_pp, num_dp)
    assert tensor == tuple(tuple(range(s, s + 8)) for s in range(0, world, 8))
    stage = world // 4
    assert pipe == tuple(tuple(range(r, world, stage)) for r in range(stage))
    assert data == tuple(
        tuple(range(s * stage + t, (s + 1) * stage, 8)) for s in range(4) for t in range(8)
    )


def test_loss_axes_hold_every_rank_that_sees_other_tokens() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    assert mesh.dp == 6
    assert mesh.degree(*LOSS_AXES) == 12
    assert mesh.degree() == 1


def test_experts_fold_over_shard_context_and_tensor_ranks() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=2)
    assert mesh.expert_groups() == tuple((r, r + 1) for r in range(0, 16, 2))
    assert mesh.expert_data_groups() == (
        (0, 2, 4, 6),
        (1, 3, 5, 7),
        (8, 10, 12, 14),
        (9, 11, 13, 15),
    )


def test_tensor_split_experts_leave_tp_out_of_the_fold() -> None:
    mesh = Mesh(dp_shard=4, tp=2, ep=2)
    assert mesh.expert_fold(expert_tp=2) == (Axis.DP_SHARD, Axis.CP)
    assert mesh.expert_groups(expert_tp=2) == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert mesh.expert_data_groups(expert_tp=2) == ((0, 4), (2, 6), (1, 5), (3, 7))


@pytest.mark.system("S38")
def test_sixty_four_way_experts_span_eight_nodes() -> None:
    mesh = Mesh(pp=16, dp_shard=128, ep=64)
    assert mesh.world_size == 2048
    for group in mesh.expert_groups():
        assert len({rank // 8 for rank in group}) == 8
    assert {len(group) for group in mesh.expert_data_groups()} == {2}


@given(MESHES, st.sampled_from((1, 2)), st.data())
@settings(deadline=None, max_examples=examples(30))
def test_each_expert_group_meets_each_of_its_data_groups_once(
    mesh: Mesh, expert_tp: int, data: st.DataObject
) -> None:
    fold = mesh.degree(*mesh.expert_fold(expert_tp=expert_tp))
    ep = data.draw(st.sampled_from([n for n in range(1, fold + 1) if fold % n == 0]))
    assume(mesh.world_size <= 256)
    folded = replace(mesh, ep=ep)
    experts = folded.expert_groups(expert_tp=expert_tp)
    copies = folded.expert_data_groups(expert_tp=expert_tp)
    for groups in (experts, copies):
        assert sorted(r for group in groups for r in group) == list(range(folded.world_size))
    assert all(len(group) == ep for group in experts)
    held = {rank: index for group in experts for index, rank in enumerate(group)}
    for group in copies:
        assert len({held[rank] for rank in group}) == 1
        assert len({folded.coordinates(rank)[Axis.PP] for rank in group}) == 1


def test_experts_that_do_not_divide_the_fold_are_refused() -> None:
    with pytest.raises(ValueError, match="ep = 3 does not divide dp_shardxcpxtp"):
        Mesh(dp_shard=2, ep=3).expert_groups()


def test_hybrid_sharding_is_not_written_as_one_degree() -> None:
    hybrid = Mesh(dp_replicate=2, dp_shard=4)
    assert (hybrid.dp_text, hybrid.data_degrees) == ("2x4", {"dp_replicate": 2, "dp_shard": 4})
    for mesh in (Mesh(dp_replicate=8), Mesh(dp_shard=8)):
        assert (mesh.dp_text, mesh.data_degrees) == ("8", {"dp": 8})
