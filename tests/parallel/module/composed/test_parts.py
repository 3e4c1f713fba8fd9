"""Unused, shared and frozen parameters, buffers, branches by rank: right, or refused by a rule."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from tests.parallel.module.composed import composed_targets as targets
from tests.parallel.module.composed.composed_targets import composed_plan
from tests.parallel.module.composed.parts import Parts
from tests.parallel.module.composed.test_composed import assert_as_in_one_process

CUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "cp": {"cp": 2, "sequence_length": 8},
}

FROZEN = ("tokens", "blocks.0.attention.qkv", "blocks.1.down", "norm")

RIGHT = [
    *((part, cut) for part in ("tied", "frozen", "count") for cut in CUTS),
    *(("shared", cut) for cut in CUTS),  # two stages are both ends, which add up what they share
    *(("mean", cut) for cut in ("tp", "pp")),
]

# Along the sequence each rank has its own positions inside of the blocks: a branch by rank in them
# is seen by a proof alone.
REFUSED = {
    **{("unused", cut): ("unused-parameter", "extra.weight got no gradient") for cut in CUTS},
    ("mean", "sequence"): ("module-tensor-ranks", "the buffer blocks.1.seen is not the same"),
    ("mean", "cp"): ("module-attention", "the buffer blocks.1.seen becomes another"),
    ("branch", "tp"): ("module-tensor-ranks", "the forward depends on the rank"),
    ("branch", "pp"): ("module-chain", "the forward depends on the rank"),
    ("branch", "cp"): ("module-attention", "its forward depends on the rank"),
}


def case_of(part: str, cut: str) -> Parts:
    """Return a case."""
    frozen = FROZEN if part == "frozen" else ()
    return Parts(plan=composed_plan(**CUTS[cut]), part=part, frozen=frozen)


def slow(cases: Any, fast: tuple[str, str]) -> list[Any]:
    """Return the cases, of which the default run takes one."""
    return [pytest.param(*one, marks=() if one == fast else pytest.mark.slow) for one in cases]


@pytest.mark.parametrize(("part", "cut"), slow(RIGHT, ("frozen", "cp")))
def test_what_is_right(rank_pool: RankPool, part: str, cut: str) -> None:
    assert_as_in_one_process(rank_pool, case_of(part, cut))


@pytest.mark.parametrize(("part", "cut"), slow(REFUSED, ("branch", "pp")))
def test_what_is_refused(rank_pool: RankPool, part: str, cut: str) -> None:
    rule, told = REFUSED[part, cut]
    with pytest.raises(RankFailure, match=rule) as caught:
        rank_pool.run(targets.train, case_of(part, cut), world_size=2, timeout_s=200.0)
    assert told in str(caught.value)
