"""The seconds of a collective are the median of its runs, of the slowest rank; a message's half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from echelon.cost.fit.samples import COLLECTIVES, Collective
from echelon.launch.context import RankContext, RankProgress
from echelon.training.measure import collectives as module
from echelon.training.measure.collectives import (
    LEAST_RUNS,
    MOST_RUNS,
    CollectiveJob,
    measure_collectives,
)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RankContext]:
    """Return the context of the only rank of a job."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield RankContext(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        store=cast("Any", None),
        progress=RankProgress(),
    )
    dist.destroy_process_group()


def job(window_s: float, *degrees: int) -> CollectiveJob:
    return CollectiveJob(
        collectives=[
            Collective(kind=kind, degree=degree, num_bytes=64)
            for degree in degrees
            for kind in COLLECTIVES
        ],
        window_s=window_s,
    )


def count_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let each look at the clock be a second later than the last; return the looks."""
    looks: list[float] = []

    def now() -> float:
        looks.append(float(len(looks)))
        return looks[-1]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    return looks


@pytest.mark.parametrize(("window_s", "runs"), [(0.0, LEAST_RUNS), (10.0, 10), (1e6, MOST_RUNS)])
def test_runs_fill_the_window(
    context: RankContext, monkeypatch: pytest.MonkeyPatch, window_s: float, runs: int
) -> None:
    looks = count_seconds(monkeypatch)
    # There and back takes as long as any other: one way is half of it.
    assert measure_collectives(context, job(window_s, 1)) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert len(looks) == len(COLLECTIVES) * 2 * (1 + runs)
    assert context.progress.doing == "measuring send 1 ranks 0.0625 KiB"
    assert context.progress.waiting == ""


def test_a_rank_outside_of_a_collective_takes_the_seconds_of_the_slowest(
    context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[float] = []

    def slowest(tensor: torch.Tensor, *, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.MAX
        own.append(float(tensor))
        tensor.fill_(max(float(tensor), 0.75))

    def no_group(ranks: list[int]) -> object:
        return dist.group.WORLD if context.rank in ranks else object()

    count_seconds(monkeypatch)
    monkeypatch.setattr(module.dist, "all_reduce", slowest)
    monkeypatch.setattr(module.dist, "new_group", no_group)
    inside = measure_collectives(context, job(0.0, 1))
    assert inside == [1.0, 1.0, 1.0, 1.0, 0.75]
    object.__setattr__(context, "rank", 3)
    assert measure_collectives(context, job(0.0, 2)) == [0.75] * 5
    assert own == [1.0, 1.0, 1.0, 1.0, 0.5, *[0.0] * 5]
