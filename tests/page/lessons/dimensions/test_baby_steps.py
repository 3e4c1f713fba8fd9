"""One model and one batch, cut three times: nothing is lost, and places are those of the mesh."""

from __future__ import annotations

import pytest

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.dimensions import MESH, baby_steps, weights_of
from tests.page.lessons.shown import diagrams, facts, tiles


@pytest.mark.system("S58")
def test_each_cut_doubles_the_ranks_up_to_those_of_the_guide() -> None:
    (claim,) = (one for one in all_claims() if one.id == "llm-training-60")
    frames = baby_steps().scene().frames
    ranks = [int(facts(one)["ranks"]) for one in frames]
    assert ranks == [1, 2, 4, 8, 8]
    assert ranks[-1] == claim.holds == MESH.world_size
    for frame, count in zip(frames, ranks, strict=True):
        (board,) = diagrams(frame)
        assert sum(place.label != "samples" for place in board.places) == count


def test_every_replica_has_every_half_of_every_layer_and_samples_are_dealt_once() -> None:
    for frame in baby_steps().scene().frames:
        (board,) = diagrams(frame)
        replicas = list(dict.fromkeys(place.group for place in board.places))
        samples = [name for name in tiles(frame) if name.startswith("sample")]
        assert sorted(samples) == [f"sample {one}" for one in range(8)]
        for replica in replicas:
            held = [
                tile.words
                for place in board.places
                if place.group == replica
                for tile in place.tiles
                if tile.words.startswith("layer")
            ]
            assert len(held) == len(set(held)) == 8


def test_ranks_and_coordinates_are_those_of_the_mesh() -> None:
    (board,) = diagrams(baby_steps().scene().frames[-1])
    named = {place.label: place.note for place in board.places if place.note}
    assert len(named) == 8
    for rank in range(8):
        here = MESH.coordinates(rank)
        at = f"dp {here[Axis.DP_REPLICATE]}, tp {here[Axis.TP]}, pp {here[Axis.PP]}"
        assert named[f"rank {rank}"] == at


def test_weights_are_counted() -> None:
    assert [weights_of(mesh) for mesh in (Mesh(), Mesh(pp=2), MESH)] == [256, 128, 64]
