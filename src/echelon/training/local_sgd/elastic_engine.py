# SPDX-License-Identifier: Apache-2.0
"""A rank of an island that may be lost while the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.training.engine import StepResult, TrainEngine
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.outer_steps import OuterSteps


class ElasticIsland(TrainEngine):
    """Take inner steps, and outer ones with the islands that are there."""

    outer_kind: ClassVar[type[OuterSteps]] = ElasticOuterSteps

    @property
    def meets(self) -> ElasticOuterSteps:
        """Return what takes outer steps."""
        assert isinstance(self.outer, ElasticOuterSteps), "its kind says so"
        return self.outer

    def connect(self, context: RankContext, message_s: float, ends_after: int) -> None:
        """Learn where islands are met, and after how many steps the run ends."""
        self.meets.connect(context, message_s, ends_after)

    def come_in(self) -> int | None:
        """Come into a run that goes on; return the steps that are done, None where it is over.

        The inner optimizer begins anew, from what islands agree on.
        """
        done = self.meets.come_in()
        if done is not None:
            self.refresh(slices=True)
        return done

    def step(
        self,
        batches: Sequence[TokenBatch],
        step: int,
        *,
        stop_requested: bool = False,
        used_bytes: int = 0,
    ) -> StepResult:
        """Take a step as `TrainEngine` does; say who met at its end, and who of them asks to stop.

        Who asks is heard where a round ends.
        """
        report = super().step(batches, step, stop_requested=stop_requested, used_bytes=used_bytes)
        met = self.meets.met_after(step + 1)
        if met is None:
            return report
        asked = met.asks if self.meets.ends_round(step) else 0
        return replace(report, stop_requests=asked, islands=tuple(sorted(met.members)))

    def _update(self, report: StepResult, step: int) -> None:
        self.meets.hear(report.loss, report.tokens)
        super()._update(report, step)
