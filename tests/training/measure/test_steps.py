"""Steps are taken by the engine that trains; those that warm up are not counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from echelon.launch.context import RankContext, RankProgress
from echelon.training.engine import TrainEngine
from echelon.training.measure import steps as module
from echelon.training.measure.steps import StepsJob, take_steps
from tests.parallel.layouts import plan_of


def test_the_median_is_that_of_the_steps_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps that warm up are not ended by a look at the clock; the others take 4, 1 and 3.
    looks = [0.0, 100.0, 200.0, 204.0, 210.0, 211.0, 220.0, 223.0]
    barriers: list[int] = []
    losses: list[float] = []
    step = TrainEngine.step

    def noted(self: TrainEngine, *arguments: Any) -> Any:
        result = step(self, *arguments)
        losses.append(result.loss)
        return result

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: looks.pop(0)))
    monkeypatch.setattr(module.dist, "barrier", lambda: barriers.append(len(looks)))
    monkeypatch.setattr(TrainEngine, "step", noted)
    context = RankContext(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        store=cast("Any", None),
        progress=RankProgress(),
    )
    assert take_steps(context, StepsJob(plan=plan_of(), warmup=2, steps=3)) == 3.0
    assert barriers == [8, 7, 6, 4, 2]  # all ranks meet, then the clock is read
    assert context.progress.doing == "step 4"
    # One batch over and over: it is learned.
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
