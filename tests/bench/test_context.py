"""Context parallelism in the benchmarks: its modes, and attention by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.context.__main__ import ContextOptions, measure_length, table
from bench.context.spec import Heads, chosen_kinds, fits
from bench.harness.catalogue import ours, peers
from bench.harness.hosts import one_host
from bench.harness.plans import bench_plan
from bench.harness.ranks import RankGroup
from bench.harness.spec import CONTEXT_MODES, SIZES, Mode
from echelon.cost.bytes.sent import bytes_sent_by_axis

TINY = SIZES["tiny"]


@pytest.mark.parametrize("mode", CONTEXT_MODES.values(), ids=lambda mode: mode.name)
def test_every_mode_has_the_plan_of_its_kind_and_all_peers(mode: Mode) -> None:
    plan = bench_plan(ours(mode).settings(TINY))
    assert (plan.mesh.cp, plan.mesh.world_size) == (mode.cp, mode.world_size)
    assert plan.layout.context.kind == mode.context
    assert plan.placement.ulysses_degree == mode.ulysses_degree
    labels = {case.label for case in peers(mode, Path("/nowhere"), at_most=9)}
    assert {"torch Ulysses by hand", "picotron ring", "DeepSpeed Ulysses"} <= labels


@pytest.mark.one_in(4)
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


def test_kinds_that_are_another_by_another_name_are_left_out() -> None:
    heads = Heads.parse("8x2")
    assert heads == Heads(query=8, kv=2, dim=64)
    assert Heads.parse(str(heads)) == heads
    assert fits("ulysses", 4, heads)
    assert not fits("ulysses", 3, heads)
    assert not fits("ulysses-ring", 2, heads)
    assert fits("ulysses-ring", 4, heads)
    assert fits("ring", 3, heads)
    with pytest.raises(ValueError, match="8x3"):
        Heads.parse("8x3")
    with pytest.raises(ValueError, match="spiral"):
        chosen_kinds("ring,spiral")


@pytest.mark.slow
def test_every_kind_agrees_with_attention_on_one_rank_and_tells_what_it_sent(
    tmp_path: Path,
) -> None:
    options = ContextOptions(
        lengths=(256,),
        ranks=(2,),
        kinds=("whole", "ring", "plain-ulysses", "plain-ring"),
        heads=(Heads(query=4, kv=2, dim=16),),
        dtype="float32",
        rounds=1,
        steps=1,
        json=None,
        logs=tmp_path,
    )
    entered, told = measure_length(options, options.heads[0], 256)
    assert entered.failures == {}
    found = {one.kind: one for one in told}
    assert set(found) == set(options.kinds)
    assert found["whole"].error == 0.0
    assert all(one.error is not None and one.error < 2e-6 for one in told)
    # Of 64-row chunks 0 to 3, rank 0 has 0 and 3 and sends 0; rank 1 has 1 and 2 and sends both.
    # Keys and values forward and backward, and their gradients back: 2 heads of 16, 4 bytes.
    rows = 3 * 64
    assert found["ring"].recorded_bytes == 3 * rows * 2 * 2 * 16 * 4 // 2
    assert found["plain-ring"].recorded_bytes is None
    own = 128 * (4 + 2 * 2) * 16 * 4
    assert all(one.allocated_bytes > own for one in told)
    lines = table(told, {"torch": "no strategy"}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "did not run: no strategy" in lines[-1]
