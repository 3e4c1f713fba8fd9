"""Three ways to split: what a rank has of samples, matrices and layers, and what it sends."""

from __future__ import annotations

import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import tensor_message_bytes
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.mesh.three_dimensions import (
    part_of_matrix,
    samples_of,
    three_dimensions,
    ways,
)
from tests.page.lessons.shown import facts, tiles


@pytest.mark.system("S58")
def test_shares_are_those_of_the_guide() -> None:
    claims = {one.id: one.holds for one in all_claims()}
    frames = three_dimensions().scene(ranks="4").frames
    assert len(frames) == 3
    assert len(samples_of(0, 4)) == claims["distributed-01"] == 8
    assert list(part_of_matrix(4)) == claims["distributed-02"] == [4096, 4096]
    assert [tiles(frames[0])[f"{rank}-0"].label for rank in range(4)] == [
        "samples 0 to 7",
        "samples 8 to 15",
        "samples 16 to 23",
        "samples 24 to 31",
    ]
    assert tiles(frames[1])["3-1"].label == "[4096, 4096]"
    assert [tiles(frames[2])[f"{rank}-2"].label for rank in range(4)] == [
        "layers 0 to 7",
        "layers 8 to 15",
        "layers 16 to 23",
        "layers 24 to 31",
    ]
    assert facts(frames[2])["a rank holds"] == f"{claims['distributed-04']} of 32 layers"


def test_only_one_thing_is_cut_at_a_time() -> None:
    for cut, frame in enumerate(three_dimensions().scene(ranks="8").frames):
        for name, tile in tiles(frame).items():
            is_cut = name.endswith(f"-{cut}")
            assert tile.words.endswith("cut" if is_cut else "whole")


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_bytes_are_those_of_the_formulas(degree: int) -> None:
    data, tensor, pipeline = ways(degree)
    assert data.sent == pytest.approx(2 * (degree - 1) / degree * 14e9)
    # Two sums a layer forward, two backward, of 32 samples: 2 (N-1)/N of each.
    message = tensor_message_bytes(32, 32, 2048, 4096)
    assert message == 2 * 32 * 32 * 2048 * 4096 * 2
    assert tensor.sent == 2 * (2 * (degree - 1) * message // degree)
    assert pipeline.sent == min(2, degree - 1) * 32 * 2048 * 4096 * 2
    frames = three_dimensions().scene(ranks=str(degree)).frames
    told = [facts(one)["a rank sends in a step"] for one in frames]
    assert told == [decimal_bytes(one.sent) for one in ways(degree)]
