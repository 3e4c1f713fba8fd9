"""Steps that take a global batch: how it is cut, and the same call without a pipeline."""

from __future__ import annotations

import pytest
import torch

from echelon.core.errors import ConfigError
from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.training.module.whole_step import checksum, cut
from tests.parallel.module.pipeline import targets
from tests.parallel.module.pipeline.targets import Case, plan


def test_each_data_rank_has_its_microbatches_of_a_batch() -> None:
    one = plan(dp=2, microbatches=2, microbatch_sequences=3)
    ids = torch.arange(12)[:, None]
    table = torch.zeros(1, 5)
    shares = cut(one, {"ids": ids, "table": table, "flag": True})
    assert [[part["ids"].flatten().tolist() for part in share] for share in shares] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8], [9, 10, 11]],
    ]
    assert all(part["table"] is table and part["flag"] for share in shares for part in share)
    with pytest.raises(ConfigError, match="12 samples, and ids has 11"):
        cut(one, {"ids": ids[1:]})
    with pytest.raises(ConfigError, match="no tensor has any"):
        cut(one, {"table": table})


def test_a_checksum_tells_batches_apart() -> None:
    ids = torch.arange(6)
    assert checksum({"ids": ids, "n": 3}) == checksum({"n": 4, "ids": ids.clone()})
    assert checksum({"ids": ids}) != checksum({"ids": ids + 1})


@pytest.mark.parametrize("zero", [Zero(), Zero(stage=3)])
def test_the_same_call_without_a_pipeline(rank_pool: RankPool, zero: Zero) -> None:
    data = "dp_shard" if zero.stage else "dp"
    case = Case(plan=plan(pp=1, microbatches=2, zero=zero, **{data: 2}))
    expected = targets.one_process(case)
    ranks = rank_pool.run(targets.train, case, world_size=2)
    for one in ranks:
        assert one.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)
        assert one.norms == pytest.approx(expected.norms, rel=1e-10, abs=0)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-10, abs=0)
    for name, value in expected.after.items():
        torch.testing.assert_close(ranks[0].after[name], value, rtol=0, atol=1e-10, msg=name)
