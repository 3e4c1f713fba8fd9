"""Context parallelism in the benchmarks: its modes, and attention by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.catalogue import ours, peers
from bench.hosts import one_host
from bench.plans import bench_plan
from bench.ranks import RankGroup
from bench.spec import CONTEXT_MODES, SIZES, Mode
from echelon.cost.bytes_sent import bytes_sent_by_axis

TINY = SIZES["tiny"]


@pytest.mark.parametrize("mode", CONTEXT_MODES.values(), ids=lambda mode: mode.name)
def test_every_mode_has_the_plan_of_its_kind_and_all_peers(mode: Mode) -> None:
    plan = bench_plan(ours(mode).settings(TINY))
    assert (plan.mesh.cp, plan.mesh.world_size) == (mode.cp, mode.world_size)
    assert plan.layout.context.kind == mode.context
    assert plan.placement.ulysses_degree == mode.ulysses_degree
    labels = {case.label for case in peers(mode, Path("/nowhere"), at_most=9)}
    assert {"torch Ulysses by hand", "picotron ring", "DeepSpeed Ulysses"} <= labels


@pytest.mark.parametrize("mode", CONTEXT_MODES.values(), ids=lambda mode: mode.name)
def test_the_engine_learns_and_records_the_bytes_of_the_formulas(
    mode: Mode, tmp_path: Path
) -> None:
    case = ours(mode)
    settings = case.settings(TINY)
    with one_host() as host, RankGroup(case, settings, [host], tmp_path) as group:
        taken = group.run(warmup=1, steps=2)
    formula: dict[str, int] = {}
    for rank in range(mode.world_size):
        for axis, count in bytes_sent_by_axis(bench_plan(settings), rank).items():
            formula[axis] = formula.get(axis, 0) + count
    assert taken.recorded_bytes == formula
    assert taken.first_loss is not None
    assert taken.last_loss is not None
    assert taken.last_loss < taken.first_loss
