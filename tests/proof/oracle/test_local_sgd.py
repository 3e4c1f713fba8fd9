"""The oracle of local SGD: what it makes of meetings, by what the definitions say."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.oracle.local_sgd import run_islands
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import NESTEROV, with_islands


@pytest.mark.system("B06")
def test_rounds_of_one_step_with_plain_sgd_average_parameters() -> None:
    """Evidence of row B06: with H = 1 and rate 1 the outer parameters are the islands' mean."""
    plan = shrink(with_islands(layout(accumulation=1), 3, every=1), precision="fp64")
    found = run_islands(plan, 3)
    for one in found.outer:
        assert set(one.changed) == set(one.after)
        for name in one.changed:
            islands = torch.stack([one.before[name] - moved[name] for moved in one.moved])
            torch.testing.assert_close(one.after[name], islands.mean(0), rtol=0, atol=1e-15)
            assert all(torch.equal(i[one.step].after[name], one.after[name]) for i in found.islands)


def test_islands_are_apart_between_meetings_and_fragments_meet_in_turn() -> None:
    local = {"every": 3, "fragments": 2, **NESTEROV}
    plan = shrink(with_islands(layout(accumulation=1), **local), precision="fp64")
    found = run_islands(plan, 6)
    met = [one.changed for one in found.outer]
    first = {"embedding.weight", *(name for name in met[0] if name.startswith("layers.0."))}
    assert set(met[0]) == first == set(met[3])
    assert set(met[2]) == set(met[5]) == set(found.outer[0].after) - first
    assert not met[1]
    assert not met[4]
    one, other = (island[1].after["embedding.weight"] for island in found.islands)
    assert not torch.equal(one, other)
    assert found.outer[3].momentum_before["embedding.weight"].norm() > 0


def test_what_comes_late_leaves_half_of_what_an_island_has() -> None:
    plan = shrink(
        with_islands(layout(accumulation=1), every=3, delay=1, **NESTEROV), precision="fp64"
    )
    found = run_islands(plan, 4)
    assert not found.outer[2].changed
    late, name = found.outer[3], "embedding.weight"
    for island in found.islands:
        step = island[3]
        assert torch.equal(step.updates[name].total, step.after[name] - step.before[name])
    apart = [island[3].after[name] for island in found.islands]
    assert not torch.equal(*apart)
    # Each is half its own values of before, half the outer parameters.
    own = [2 * after - late.after[name] for after in apart]
    assert (own[0] - own[1]).norm() > 0
