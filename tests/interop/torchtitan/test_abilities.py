"""torchtitan shares out everything as soon as there is more than one rank to do so."""

from __future__ import annotations

from echelon.interop.tools import TOOLS
from echelon.interop.torchtitan.abilities import ABILITIES, SPLIT_BACKWARD


def zero_stages(**degrees: int) -> list[int]:
    mesh = {"dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 1, "tp": 1, **degrees}
    allows = ABILITIES.allows_zero
    return [stage for stage in range(4) if allows(stage, **mesh)]


def test_stages_of_zero() -> None:
    assert zero_stages() == zero_stages(dp_shard=1, cp=2) == [3]
    assert zero_stages(dp_shard=1) == [0]


def test_copies_that_share_nothing_out_stand_alone() -> None:
    assert zero_stages(dp_shard=1, dp_replicate=8) == [0]
    for axis in ("tp", "pp"):
        assert zero_stages(dp_shard=1, dp_replicate=2, **{axis: 4}) == []
        assert zero_stages(dp_shard=1, **{axis: 4}) == [0]
        assert zero_stages(dp_shard=2, dp_replicate=2, **{axis: 4}) == [3]


def test_compiled_blocks_have_one_backward() -> None:
    tool = TOOLS["torchtitan"]
    eager, compiled = (tool.abilities_of(name).schedules for name in tool.generations)
    assert eager is not None
    assert compiled is not None
    assert set(SPLIT_BACKWARD) <= set(eager)
    assert set(eager) - set(compiled) == set(SPLIT_BACKWARD)
