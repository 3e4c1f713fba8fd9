"""Context parallelism in the benchmarks: its modes, and attention by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.context.__main__ import measure_length
from bench.context.exposed import Exposure, exposures, worst
from bench.context.memory import RESOLUTION, UNIT, Peak, longest_that_fits, unevenness
from bench.context.options import ContextOptions
from bench.context.spec import FitVariant, Heads, chosen_kinds, context_mode, fits
from bench.context.table import read_ranks, table_lines
from bench.harness.catalogue import Case, ours, peers
from bench.harness.hosts import Host, one_host
from bench.harness.plans import bench_plan
from bench.harness.ranks import CaseFailed, RankGroup
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


def _turn(exchange: tuple[float, float], wait: tuple[float, float]) -> dict[str, Any]:
    return {
        "steps": [["1", 0.0, 10.0]],
        "waits": [["ring.forward.1", *wait]],
        "exchanges": [["ring.forward.1", *exchange]],
        "work": [["ring.forward.0", 0.0, 6.0]],
    }


def test_a_wait_is_for_the_other_rank_until_it_comes_and_for_transfer_then() -> None:
    early = _turn((0.0, 9.0), (6.0, 9.0))
    late = _turn((8.0, 9.0), (8.5, 9.0))
    first, second = exposures([early, late])
    assert first == Exposure(total_s=10.0, work_s=6.0, late_s=2.0, transfer_s=1.0)
    assert second == Exposure(total_s=10.0, work_s=6.0, late_s=0.0, transfer_s=0.5)
    assert first.waited == pytest.approx(0.3)
    assert first.transferring == pytest.approx(0.1)
    assert worst([[first, second], [second, second], [second, second]]) == second
    assert worst([[first, second], [first, second], [second, second]]) == first


def test_steps_are_told_apart_by_when_an_exchange_began() -> None:
    turn = _turn((0.0, 9.0), (8.0, 9.0))
    turn["steps"].append(["2", 10.0, 20.0])
    turn["exchanges"].append(["ring.forward.1", 19.0, 20.0])
    turn["waits"].append(["ring.forward.1", 19.0, 20.0])
    (one,) = exposures([turn])
    assert (one.late_s, one.transfer_s) == (0.0, 2.0)


@pytest.mark.parametrize("factor", [2.0, 1.2])
@pytest.mark.parametrize("limit", [300, 2048, 5000, 77_777])
def test_the_longest_length_that_fits_is_found_from_below_and_above(
    limit: int, factor: float
) -> None:
    tried: list[int] = []

    def fits_within(length: int) -> bool:
        tried.append(length)
        return length <= limit

    found = longest_that_fits(fits_within, 4096, factor=factor)
    assert found <= limit < found + max(UNIT, RESOLUTION * found)
    assert all(length % UNIT == 0 for length in tried)
    assert len(tried) == len(set(tried))


def test_where_nothing_fits_that_is_said() -> None:
    with pytest.raises(ValueError, match="not even 256 positions"):
        longest_that_fits(lambda _: False, 4096)


def test_memory_that_grows_as_the_length_is_even() -> None:
    def peak(length: int, ranks: int, count: int) -> Peak:
        return Peak(
            heads="8x8x64", ranks=ranks, length=length, allocated_bytes=count, resident_bytes=count
        )

    assert unevenness([peak(1024, 4, 1000), peak(4096, 4, 4000)]) == 1.0
    assert unevenness([peak(1024, 4, 1000), peak(4096, 4, 16000)]) == 4.0


@pytest.mark.slow
def test_every_kind_agrees_with_attention_on_one_rank_and_tells_what_it_sent(
    tmp_path: Path,
) -> None:
    options = ContextOptions(
        part="table",
        lengths=(256,),
        ranks=(2,),
        kinds=("whole", "ring", "plain-ulysses", "plain-ring"),
        heads=(Heads(query=4, kv=2, dim=16),),
        dtype="float32",
        rounds=1,
        steps=1,
        mbit=None,
        limit_bytes=0,
        layers=1,
        fit=False,
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
    lines = list(table_lines(options.heads[0], 256, told, {"torch": "no strategy"}))
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert "did not run: no strategy" in lines[-1]


def _fit(limit_bytes: int, length: int, folder: Path) -> RankGroup:
    case = Case(
        label="fit",
        module="bench.context.fit_case",
        variant=str(FitVariant(limit_bytes=limit_bytes, folder=str(folder))),
        mode=context_mode("ring", 2),
        python=Path(sys.executable),
    )
    size = Heads(query=2, kv=2, dim=16).size(length)
    host = Host(namespace=None, interface="lo", address="127.0.0.1")
    return RankGroup(case, case.settings(size), [host], folder)


@pytest.mark.slow
def test_a_step_that_fits_says_how_far_it_grew(tmp_path: Path) -> None:
    with _fit(2**30, 4096, tmp_path) as group:
        group.run(warmup=0, steps=2)
    told = read_ranks(tmp_path, "grown", 2)
    # The residual stream of a rank alone, in fp32: 2048 positions of 32.
    assert all(2048 * 32 * 4 < one["grown_bytes"] < 2**30 for one in told)
    assert all(one["loss"] == told[0]["loss"] for one in told)
    assert not list(tmp_path.glob("over-*"))


@pytest.mark.slow
def test_a_rank_over_its_limit_is_ended_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(CaseFailed), _fit(2**20, 32768, tmp_path) as group:
        group.run(warmup=0, steps=2)
    assert list(tmp_path.glob("over-*"))
