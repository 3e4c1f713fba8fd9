"""A shrunk model keeps its kinds of blocks, and a divisor for each frequency."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import RopeScaling
from echelon.proof.shrink_attention import small_kinds, small_stretch
from tests.parallel.layouts import NANO, plan_of


def test_few_blocks_are_of_both_kinds() -> None:
    shape = replace(NANO, window=3, layer_kinds=("local",) * 5 + ("global",))
    assert small_kinds(shape, 2) == ("local", "global")
    assert small_kinds(shape, 6) == shape.layer_kinds
    assert small_kinds(NANO, 2) == ()


def test_a_narrow_head_has_fewer_divisors_and_a_long_sequence_stays_long() -> None:
    scaling = RopeScaling(
        kind="longrope",
        factor=4.0,
        original_positions=8,
        short_factors=(1.0, 1.5),
        long_factors=(2.0, 4.0),
    )
    model = replace(NANO, rope_scaling=scaling)
    found = small_stretch(plan_of(model=model, sequence_length=16), 12, 2)
    assert found is not None
    assert (found.short_factors, found.long_factors) == ((1.0,), (2.0,))
    assert found.original_positions == 6
    short = small_stretch(plan_of(model=model, sequence_length=8), 12, 8)
    assert short is not None
    assert (short.original_positions, len(short.long_factors)) == (12, 4)
