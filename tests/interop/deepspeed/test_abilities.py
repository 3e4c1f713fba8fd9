"""DeepSpeed's pipelines, tensor ranks and replicas go with some stages of ZeRO only."""

from __future__ import annotations

from echelon.interop.deepspeed.abilities import ABILITIES


def zero_stages(**degrees: int) -> list[int]:
    mesh = {"dp_replicate": 1, "dp_shard": 2, "pp": 1, "cp": 1, "tp": 1, **degrees}
    allows = ABILITIES.allows_zero
    return [stage for stage in range(4) if allows(stage, **mesh)]


def test_stages_of_zero() -> None:
    assert zero_stages() == [0, 1, 2, 3]
    assert zero_stages(pp=2) == [0, 1]
    assert zero_stages(tp=2) == [0, 1, 2]
    assert zero_stages(dp_replicate=2) == [0, 3]
