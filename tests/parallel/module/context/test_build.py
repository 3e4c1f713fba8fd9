"""Modules over context ranks equal one process, send what the formula says, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.plan import Context, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import part_of
from echelon.parallel.module.context import SequenceCut
from tests.parallel.module.context import context_targets
from tests.parallel.module.context.context_targets import Cut
from tests.parallel.module.pipeline.targets import one_process, plan
from tests.parallel.module.sent_bytes import module_context_bytes

PLAN = plan(pp=1, cp=2, sequence_length=8)


def cut_plan(**changes: Any) -> Any:
    """Return a plan over two context ranks, or over those that `changes` name."""
    given = {"pp": 1, "cp": 2, "sequence_length": 16, "microbatches": 2, **changes}
    return plan(**given)


def assert_as_in_one_process(rank_pool: RankPool, case: Cut) -> None:
    """Compare losses, norms, parameters and state with torch alone, and bytes with the formula."""
    expected = one_process(case)
    ranks = rank_pool.run(context_targets.train, case, world_size=case.plan.mesh.world_size)
    for rank, one in enumerate(ranks):
        assert one.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)
        assert one.norms == pytest.approx(expected.norms, rel=1e-10, abs=0)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-10, abs=0)
        # Each block has one call: a rank of a pipeline makes those of its stages.
        blocks = part_of(case.plan, rank).blocks if case.plan.mesh.pp > 1 else range(99)
        calls = [call for block, call in enumerate(one.calls) if block in blocks]
        sent = module_context_bytes(case.plan, calls, rank=rank)
        assert one.sent.get("cp", 0) == sent > 0
    assert set(ranks[0].after) == set(expected.after)
    for name, value in expected.after.items():
        torch.testing.assert_close(ranks[0].after[name], value, rtol=0, atol=1e-10, msg=name)


def test_two_context_ranks(rank_pool: RankPool) -> None:
    assert_as_in_one_process(rank_pool, Cut(plan=cut_plan()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        Context(kind="ring"),
        Context(kind="striped"),
        Context(kind="gathered"),
        Context(kind="ulysses", ulysses_degree=2),
    ],
)
@pytest.mark.parametrize("zero", [Zero(), Zero(stage=3)])
def test_kinds_beside_data_ranks(rank_pool: RankPool, context: Context, zero: Zero) -> None:
    data = "dp_shard" if zero.stage else "dp"
    one = cut_plan(context=context, zero=zero, **{data: 2})
    assert_as_in_one_process(rank_pool, Cut(plan=one))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "mistral", "gpt_neox", "phi3"])
def test_models_of_transformers(rank_pool: RankPool, kind: str) -> None:
    changes = {"sliding_window": 5} if kind == "mistral" else {}
    assert_as_in_one_process(rank_pool, Cut(plan=cut_plan(), kind=kind, changes=changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "1f1b", "context": Context(kind="ulysses", ulysses_degree=2)},
        {"schedule": "zb-h1", "dp_shard": 2, "zero": Zero(stage=3, accumulate="slices")},
    ],
)
@pytest.mark.parametrize("kind", ["own", "llama"])
def test_stages_of_cut_sequences(rank_pool: RankPool, kind: str, changes: dict[str, Any]) -> None:
    one = cut_plan(pp=2, layers=2 if kind == "own" else 4, **changes)
    assert_as_in_one_process(rank_pool, Cut(plan=one, kind=kind))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("eager", "makes no call of scaled_dot_product_attention"),
        ("bias", "adds to scores"),
        ("positions", "not those of the whole module"),
        ("mean", "not those of the whole module"),
        ("checkpointed", "computed again in backward"),
        ("reentrant", "computed again in backward"),
    ],
)
def test_what_is_refused(rank_pool: RankPool, mistake: str, said: str) -> None:
    case = Cut(plan=cut_plan(), mistake=mistake)
    for text in rank_pool.run(context_targets.refused, case, world_size=2):
        assert "error[module-attention]" in text
        assert said in text


class Told(nn.Module):
    """A module that is told positions."""

    def forward(self, ids: Any, position_ids: Any = None, attention_mask: Any = None) -> None:
        """Take them."""


class Untold(nn.Module):
    """A module that is not."""

    def forward(self, ids: Any) -> None:
        """Take ids."""


def test_each_rank_has_two_chunks_and_is_told_which() -> None:
    ids = torch.arange(16).view(2, 8)
    for rank, places in [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])]:
        found = SequenceCut(PLAN, Told(), rank).cut({"ids": ids, "weight": torch.ones(2)})
        assert torch.equal(found["ids"], ids[:, places])
        assert found["position_ids"].tolist() == [places, places]
        assert found["attention_mask"].tolist() == [[1] * 4] * 2
        assert torch.equal(found["weight"], torch.ones(2))
    assert set(SequenceCut(PLAN, Untold(), 0).cut({"ids": ids})) == {"ids"}
    assert torch.equal(SequenceCut(PLAN, Told(), 1).rows(ids), ids[:, 2:6])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": torch.tensor([[0] + [1] * 7])}, "hides tokens"),
        ({"position_ids": torch.arange(8)[None] + 1}, "are not 0 to 7"),
        ({"ids": torch.zeros(2, 6)}, "not (2, 6)"),
        ({"mask": torch.ones(2, 1, 8, 8)}, "beyond its second dim"),
    ],
)
def test_what_is_not_cut(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SequenceCut(PLAN, Told(), 0).whole({"ids": torch.zeros(2, 8), **given})
    assert said in str(caught.value)
