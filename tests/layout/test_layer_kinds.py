"""Plans of one kind of attention."""

from __future__ import annotations

from dataclasses import replace

from echelon.layout.layer_kinds import plan_of_layer
from tests.parallel.layouts import NANO, plan_of


def test_all_blocks_are_as_one() -> None:
    model = replace(NANO, window=3, layer_kinds=("local", "global"), local_rope_theta=50.0)
    plan = plan_of(model=model)
    near, far = (plan_of_layer(plan, layer).model for layer in (0, 3))
    assert (near.window, near.rope_theta, near.layer_kinds) == (3, 50.0, ())
    assert (far.window, far.rope_theta, far.layer_kinds) == (None, model.rope_theta, ())
    plain = plan_of()
    assert plan_of_layer(plain, 2) is plain
