"""Models of transformers under each way of splitting, each against its own run in one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from tests.parallel.module.composed.composed_targets import Composed, composed_plan
from tests.parallel.module.composed.test_composed import assert_as_in_one_process
from tests.parallel.module.tensor.families import FAMILIES

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero-3": {"dp_shard": 2, "zero": Zero(stage=3)},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True},
    "pp2-1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp2-zero-bubble": {"pp": 2, "schedule": "zb-h1"},
    "cp2": {"cp": 2, "sequence_length": 8},
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
}


REFUSED = {("gemma2", "cp2"): "makes no call of scaled_dot_product_attention"}
"""Gemma 2 has soft caps, which `sdpa` of transformers refuses: it attends by eager."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), REFUSED)
def test_a_family_that_is_refused(rank_pool: RankPool, family: str, layout: str) -> None:
    case = Composed(plan=composed_plan(**LAYOUTS[layout]), kind=family)
    with pytest.raises(RankFailure, match="module-attention") as caught:
        assert_as_in_one_process(rank_pool, case)
    assert REFUSED[family, layout] in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), [one for one in product(FAMILIES, LAYOUTS) if one not in REFUSED]
)
def test_a_family(rank_pool: RankPool, family: str, layout: str) -> None:
    attention = "sdpa" if layout == "cp2" else "eager"
    plan = composed_plan(**LAYOUTS[layout])
    assert_as_in_one_process(rank_pool, Composed(plan=plan, kind=family, attention=attention))
