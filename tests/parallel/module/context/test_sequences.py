"""Which positions a rank has of a batch, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.parallel.module.context.sequences import SequenceCut
from tests.parallel.module.pipeline.targets import plan

PLAN = plan(pp=1, cp=2, sequence_length=8)


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
