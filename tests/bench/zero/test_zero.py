"""The ZeRO modes: their plans, verdicts and tables, what links force, and bytes that are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cluster import wall_target
from bench.harness.catalogue import OURS, ours, peers
from bench.harness.exposed import forced_by_data, forced_s
from bench.harness.exposed_zero import forced_by_zero
from bench.harness.hosts import Link, one_host
from bench.harness.plans import bench_plan
from bench.harness.ranks import Measurement, RankGroup
from bench.harness.report import rows
from bench.harness.spec import MODES, SIZES, ZERO_MODES, Mode, Size
from bench.zero.__main__ import group_cases
from bench.zero.report import StepBytes, judge, step_bytes, zero_table

TINY, SPEC = SIZES["tiny"], SIZES["spec"]
SLOW = Link(bits_per_s=200e6, burst_bytes=0)
INSTANT = 1e-9
SAID = StepBytes(formulas={"dp": 1_000_000}, events={"dp": 1_000_000})


def _took(step_s: float, cpu_s: float = 2.0, peak_mb: int = 100) -> Measurement:
    return Measurement(
        step_s=step_s,
        cpu_s=cpu_s,
        sent_bytes=1_020_000,
        uplink_bytes=None,
        peak_bytes=peak_mb * 1_000_000,
        first_loss=9.0,
        last_loss=8.5,
        recorded_bytes={"dp": 1_000_000},
    )


def _by_quantity(mode: str, ours: Measurement, **theirs: Measurement) -> dict[str, bool]:
    found = rows({OURS: [ours], **{label: [one] for label, one in theirs.items()}})
    verdicts = judge(ZERO_MODES[mode], [found], SAID, wall_limit_s=1.0, cpu_limit_s=2.0)
    return {verdict.quantity: verdict.met for verdict in verdicts}


@pytest.mark.parametrize("mode", ZERO_MODES.values(), ids=lambda mode: mode.name)
def test_every_mode_has_the_plan_of_its_stage_and_peers_that_serve_it(mode: Mode) -> None:
    plan = bench_plan(ours(mode).settings(TINY))
    assert (plan.layout.zero.stage, plan.mesh.world_size) == (mode.zero_stage, mode.dp)
    assert plan.mesh.dp_shard == mode.dp_shard
    assert (plan.layout.zero.accumulate == "slices") == (mode.zero_stage >= 2)
    assert plan.num_microbatches == 1
    labels = {case.label for case in peers(mode, Path("/nowhere"), at_most=9)}
    assert len(labels) >= 2


@pytest.mark.parametrize(
    ("stage", "label"),
    [
        (0, "torch DDP"),
        (1, "torch ZeroRedundancyOptimizer"),
        (1, "megatron-core distributed optimizer"),
        (2, "DeepSpeed ZeRO-2"),
        (2, "torch FSDP2, kept after forward"),
        (3, "DeepSpeed ZeRO-3"),
        (3, "torch FSDP2"),
        (3, "torchtitan FSDP2"),
    ],
)
def test_a_stage_is_served_by(stage: int, label: str) -> None:
    for ranks in (2, 4):
        cases = peers(ZERO_MODES[f"zero{stage}-{ranks}"], Path("/nowhere"), at_most=9)
        assert label in {case.label for case in cases}


def test_a_tie_is_enough_at_stage_0_only_where_the_peer_is_at_the_limit() -> None:
    tie = {"quick": _took(1.05, 2.1)}
    assert _by_quantity("zero0-2", _took(1.05, 2.1), **tie)["wall"]
    assert _by_quantity("zero0-2", _took(1.05, 2.1), **tie)["CPU"]
    assert not _by_quantity("zero1-2", _took(1.05, 2.1), **tie)["wall"]
    assert not _by_quantity("zero0-2", _took(1.15, 2.1), quick=_took(1.15, 2.1))["wall"]


def test_seconds_are_compared_with_the_fastest_and_memory_with_the_leanest() -> None:
    fat = _took(1.0, 2.0, peak_mb=200)
    lean = _took(2.0, 4.0, peak_mb=90)
    assert _by_quantity("zero3-2", _took(0.9, 1.8, 95), fat=fat, lean=lean) == {
        "wall": True,
        "CPU": True,
        "peak memory": False,
        "wire": True,
    }


def test_the_heat_in_which_we_do_worst_counts() -> None:
    heats = [
        rows({OURS: [_took(0.8)], "slow": [_took(1.0)]}),
        rows({OURS: [_took(0.8)], "fast": [_took(0.82, 1.5)]}),
    ]
    wall, cpu, *_ = judge(ZERO_MODES["zero2-2"], heats, SAID, wall_limit_s=None, cpu_limit_s=None)
    assert (wall.peer, cpu.peer) == ("fast", "fast")
    assert wall.ratio == pytest.approx(0.8 / 0.82)
    assert cpu.ratio == pytest.approx(2.0 / 1.5)


def test_echelon_is_in_every_heat_and_a_peer_in_one() -> None:
    mode = ZERO_MODES["zero3-4"]
    others = peers(mode, Path("/nowhere"), at_most=9)
    heats = group_cases((ours(mode), *others), ranks_at_once=8)
    assert [len(heat) for heat in heats] == [3, 3]
    assert all(heat[0].label == OURS for heat in heats)
    assert [case for heat in heats for case in heat[1:]] == list(others)
    assert group_cases((ours(mode),), ranks_at_once=8) == [(ours(mode),)]


def test_bytes_are_judged_without_peers() -> None:
    assert _by_quantity("zero2-4", _took(1.0)) == {"wire": True}
    wrong = StepBytes(formulas={"dp_shard": 5}, events={"dp_shard": 6})
    assert not wrong.equal
    assert wrong.line().endswith("formulas say dp_shard 5; events say dp_shard 6: MISSED")


def test_the_table_sets_every_row_beside_the_fastest_peer() -> None:
    text = zero_table(
        ZERO_MODES["zero1-2"],
        {OURS: [_took(0.9)], "fast": [_took(1.0, 4.0, 300)]},
        {"other": "no GPU"},
        said=SAID,
        floors={"fast": 50_000_000},
    )
    head, _, mine, fast, out = text.splitlines()
    assert [len(line.split(" | ")) for line in (head, mine, fast)] == [13, 13, 13]
    assert f"{OURS} | 0.900 | 0.900 | 0% | 2.000 | 0.500 | 1.0 | 1.0 | 100 | - |" in mine
    assert "fast | 1.000 | 1.000 | 0% | 4.000 | 1.000 | 1.0 | - | 300 | 250 |" in fast
    assert "other | did not run: no GPU" in out
    assert out.count("|") == head.count("|")


def _weights(size: Size) -> int:
    kv = size.hidden * size.kv_heads // size.heads
    block = size.hidden * (2 * size.hidden + 2 * kv) + 3 * size.hidden * size.ffn
    return size.layers * block + 2 * size.vocab * size.hidden


def test_without_compute_every_byte_of_a_stage_is_exposed() -> None:
    table = SPEC.vocab * SPEC.hidden
    once = 4 * _weights(SPEC) / 2 / SLOW.bytes_per_s
    again = 4 * (_weights(SPEC) - 2 * table) / 2 / SLOW.bytes_per_s
    for ranks in (2, 4):
        shared = forced_by_zero(SPEC, ZERO_MODES[f"zero2-{ranks}"], SLOW, INSTANT)
        assert shared == pytest.approx(2 * once)
        freed = forced_by_zero(SPEC, ZERO_MODES[f"zero3-{ranks}"], SLOW, INSTANT)
        assert freed == pytest.approx(2 * once + again)


def test_with_endless_compute_only_the_first_gathers_and_the_last_gradient_are_exposed() -> None:
    table = 4 * SPEC.vocab * SPEC.hidden / 2 / SLOW.bytes_per_s
    block = 4 * (_weights(SPEC) / SPEC.layers) / 2 / SLOW.bytes_per_s
    assert (
        2 * table <= forced_by_zero(SPEC, ZERO_MODES["zero1-2"], SLOW, 1e6) <= 2 * (table + block)
    )
    assert (
        2 * table <= forced_by_zero(SPEC, ZERO_MODES["zero3-2"], SLOW, 1e6) <= 2 * (table + block)
    )


def test_gathering_again_forces_more_and_shards_inside_of_hosts_force_sums_only() -> None:
    assert forced_s(SPEC, ZERO_MODES["zero3-2"], SLOW, 2.0) > forced_s(
        SPEC, ZERO_MODES["zero1-2"], SLOW, 2.0
    )
    hybrid = forced_s(SPEC, ZERO_MODES["zero3-2x2"], SLOW, 2.0)
    assert hybrid == forced_by_data(SPEC, ZERO_MODES["zero0-4"], SLOW, 2.0)


def test_slow_links_ask_for_more_of_zero_than_of_other_modes() -> None:
    assert (wall_target(ZERO_MODES["zero0-2"]), wall_target(MODES["dp2"])) == (0.90, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1-2", "zero2-2", "zero3-2x2"])
def test_the_engine_records_the_bytes_of_the_formulas(name: str, tmp_path: Path) -> None:
    mode = ZERO_MODES[name]
    case = ours(mode)
    with one_host() as host, RankGroup(case, case.settings(TINY), [host], tmp_path) as group:
        group.run(warmup=0, steps=1)  # what it updates is gathered by the next step
        taken = [group.run(warmup=1, steps=2)]
    said = step_bytes(mode, TINY, taken)
    assert said is not None
    assert said.equal, said.line()
    assert taken[0].last_loss is not None
    assert taken[0].first_loss is not None
    assert taken[0].last_loss < taken[0].first_loss
