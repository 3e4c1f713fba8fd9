"""What ranks run in tests of sums in two hops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.transport.quantised_sums import HopSum, QuantisedSums
from tests.parallel.targets import Trained, train


def train_awaited(context: RankContext, argument: tuple[Plan, int]) -> Trained:
    """Take steps in which each sum is awaited where it is started, so that no two are under way."""
    start = QuantisedSums.start

    def at_once(
        self: QuantisedSums, target: torch.Tensor, whole: torch.Tensor, **named: Any
    ) -> HopSum:
        pending = start(self, target, whole, **named)
        pending.wait()
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantisedSums, "start", at_once)
        return train(context, argument)
