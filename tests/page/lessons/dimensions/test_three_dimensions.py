"""Three ways to split: what a rank has of samples, matrices and layers, and what it sends."""

from __future__ import annotations

import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import tensor_message_bytes
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.dimensions import (
    FFN,
    HIDDEN,
    samples_of,
    three_dimensions,
    ways,
)
from echelon.page.lessons.matrices import mlp_weights
from tests.page.lessons.shown import facts, tiles


@pytest.mark.system("S58")
def test_shares_are_those_of_the_guide() -> None:
    claims = {one.id: one.holds for one in all_claims()}
    frames = three_dimensions().scene(ranks="4").frames
    assert len(frames) == 3
    assert len(samples_of(0, 4)) == claims["distributed-01"] == 8
    out, inner = mlp_weights(HIDDEN, FFN)[0].local_shape(4)
    assert [inner, out] == claims["distributed-02"] == [4096, 4096]
    own = [[tiles(frames[cut])[f"{rank}-{cut}-{rank}"] for rank in range(4)] for cut in range(3)]
    assert [one.label for one in own[0]] == ["0-7", "8-15", "16-23", "24-31"]
    assert own[1][3].words == "columns 12288 to 16383 of a matrix [4096, 16384]"
    assert [one.label for one in own[2]] == ["0-7", "8-15", "16-23", "24-31"]
    assert facts(frames[2])["a rank holds"] == f"{claims['distributed-04']} of 32 layers"


@pytest.mark.parametrize("degree", [2, 4])
def test_only_one_thing_is_cut_at_a_time_and_nothing_is_lost(degree: int) -> None:
    for cut, frame in enumerate(three_dimensions().scene(ranks=str(degree)).frames):
        held = [
            [int(x) for x in name.split("-")]
            for name, one in tiles(frame).items()
            if one.state == "whole"
        ]
        for rank in range(degree):
            for kind in range(3):
                parts = [part for here, what, part in held if (here, what) == (rank, kind)]
                assert parts == ([rank] if kind == cut else list(range(degree)))


@pytest.mark.parametrize("degree", [2, 4])
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
