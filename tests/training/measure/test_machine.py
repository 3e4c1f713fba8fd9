"""Each kernel computes what it says, and seconds are those of the parts of a window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as fn

from echelon.cost.fit.samples import (
    COLLECTIVES,
    Collective,
    FusedAttentionKernel,
    LaunchKernel,
    MatmulKernel,
    MeasuredKernel,
    MemoryKernel,
    OptimizerKernel,
)
from echelon.launch.context import RankContext, RankProgress
from echelon.training.measure import machine as module
from echelon.training.measure.machine import (
    LEAST_RUNS,
    MOST_RUNS,
    PARTS,
    CollectiveJob,
    KernelJob,
    measure_collectives,
    measure_kernels,
    prepared,
    seconds_of,
)

CPU = torch.device("cpu")


def alone() -> RankContext:
    return RankContext(
        rank=0,
        world_size=1,
        device=CPU,
        store=cast("Any", None),
        progress=RankProgress(),
    )


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (MatmulKernel(rows=3, depth=5, columns=2), (3, 2)),
        (MatmulKernel(rows=3, depth=5, columns=2, batch=4), (4, 3, 2)),
        (FusedAttentionKernel(sequences=2, heads=3, length=4, head_dim=8), (2, 3, 4, 8)),
        (MemoryKernel(name="copy", num_bytes=2 * 4 * 128 * 7), (7, 128)),
        (MemoryKernel(name="add", num_bytes=3 * 4 * 128 * 7), (7, 128)),
        (MemoryKernel(name="norm", num_bytes=2 * 4 * 128 * 7), (7, 128)),
        (MemoryKernel(name="softmax", num_bytes=1), (1, 128)),
        (MemoryKernel(name="gate", num_bytes=3 * 4 * 128 * 7), (7, 128)),
        (LaunchKernel(name="add"), (1, 16)),
        (LaunchKernel(name="product"), (1, 16)),
        (LaunchKernel(name="norm"), (1, 16)),
    ],
    ids=str,
)
def test_a_kernel_has_the_size_that_it_says(kernel: MeasuredKernel, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16) if not isinstance(kernel, MemoryKernel) else ():
        result = cast("torch.Tensor", prepared(kernel, dtype, CPU)())
        assert (result.shape, result.dtype) == (shape, dtype)
    result = cast("torch.Tensor", prepared(kernel, torch.float32, CPU)())
    assert result.shape == shape
    assert bool(result.isfinite().all())


def test_backward_gives_the_gradients_of_queries_keys_and_values() -> None:
    kernel = FusedAttentionKernel(sequences=2, heads=3, length=4, head_dim=8, backward=True)
    run = prepared(kernel, torch.float32, CPU)
    for _ in range(2):  # the graph stays
        gradients = cast("tuple[torch.Tensor, ...]", run())
        assert [tuple(one.shape) for one in gradients] == [(2, 3, 4, 8)] * 3


def test_an_update_moves_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []
    draw = module._drawn

    def note(*arguments: Any) -> torch.Tensor:
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(module, "_drawn", note)
    run = prepared(OptimizerKernel(elements=10, num_bytes=1), torch.bfloat16, CPU)
    before = drawn[0].clone()
    run()
    assert drawn[0].dtype == torch.float32  # as a master copy is, whatever the parameters are
    assert bool((drawn[0] != before).all())


def clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    times = SimpleNamespace(process_time=seconds, perf_counter=seconds)
    monkeypatch.setattr(module, "time", times)


def test_seconds_are_the_median_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    # In the first two parts something else takes its time; a run takes a quarter of a second.
    cost = itertools.chain([8.0] * 2 * LEAST_RUNS, itertools.repeat(0.25))
    runs = 0

    def run() -> None:
        nonlocal now, runs
        now += next(cost)
        runs += 1

    clock(monkeypatch, lambda: now)
    assert seconds_of(run, CPU, 0.0) == 0.25
    assert runs == PARTS * LEAST_RUNS
    runs = 0
    assert seconds_of(run, CPU, 10.0) == 0.25
    assert runs == 10.0 / 0.25


def test_short_runs_are_timed_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, 0

    def run() -> None:
        nonlocal now
        now += 2.0**-20

    def seconds() -> float:
        nonlocal asked
        asked += 1
        return now

    clock(monkeypatch, seconds)
    assert seconds_of(run, CPU, 2.0**-6) == 2.0**-20
    assert asked < PARTS * 10


def test_each_kernel_of_a_job_is_told_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    context, told = alone(), iter([3.0, 1.0])

    def measured(run: Callable[[], object], device: torch.device, window_s: float) -> float:
        run()
        assert (device, window_s) == (CPU, 0.5)
        assert context.progress.doing.startswith("measuring ")
        return next(told)

    monkeypatch.setattr(module, "seconds_of", measured)
    job = KernelJob(
        kernels=[MatmulKernel(rows=2, depth=2, columns=2), LaunchKernel(name="norm")],
        dtype="fp32",
        window_s=0.5,
    )
    assert measure_kernels(context, job) == [3.0, 1.0]
    assert context.progress.count == 2


def test_a_product_is_that_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[tuple[int, ...], torch.Tensor] = {}

    def note(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return drawn.setdefault(shape, torch.randn(shape, dtype=dtype, device=device))

    monkeypatch.setattr(module, "_drawn", note)
    result = prepared(MatmulKernel(rows=3, depth=5, columns=2), torch.float64, CPU)()
    torch.testing.assert_close(result, fn.linear(drawn[3, 5], drawn[2, 5]))


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
