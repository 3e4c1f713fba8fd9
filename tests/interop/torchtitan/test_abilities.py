"""torchtitan shares out everything as soon as there is more than one rank to do so."""

from __future__ import annotations

from echelon.interop.torchtitan.abilities import ABILITIES


def zero_stages(**degrees: int) -> list[int]:
    mesh = {"dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 1, "tp": 1, **degrees}
    allows = ABILITIES.allows_zero
    return [stage for stage in range(4) if allows(stage, **mesh)]


def test_stages_of_zero() -> None:
    assert zero_stages() == zero_stages(dp_shard=1, cp=2) == [3]
    assert zero_stages(dp_shard=1) == [0]
