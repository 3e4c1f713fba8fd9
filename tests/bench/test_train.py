"""The ZeRO modes side by side: plans, peers, heats, targets, and bytes that are equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.cluster import wall_target
from bench.harness.catalogue import OURS, chosen_modes, ours, peers
from bench.harness.hosts import one_host
from bench.harness.interleave import Contest
from bench.harness.plans import bench_plan
from bench.harness.ranks import Measurement, RankGroup
from bench.harness.report import rows
from bench.harness.spec import MODES, MODULE_MODES, SIZES, ZERO_MODES, Mode
from bench.train import group_cases, mode_verdicts, said_line

TINY = SIZES["tiny"]


def test_all_of_zero_and_of_a_module_have_names() -> None:
    assert chosen_modes("dp2,zero") == (MODES["dp2"], *ZERO_MODES.values())
    assert chosen_modes("module") == tuple(MODULE_MODES.values())


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


def test_echelon_is_in_every_heat_and_a_peer_in_one() -> None:
    mode = ZERO_MODES["zero3-4"]
    others = peers(mode, Path("/nowhere"), at_most=9)
    heats = group_cases((ours(mode), *others), ranks_at_once=8)
    assert [len(heat) for heat in heats] == [3, 3]
    assert all(heat[0].label == OURS for heat in heats)
    assert [case for heat in heats for case in heat[1:]] == list(others)
    assert group_cases((ours(mode),), ranks_at_once=8) == [(ours(mode),)]


def _contest(step_s: float, cpu_s: float, folder: Path) -> Contest:
    taken = Measurement(
        step_s=step_s,
        cpu_s=cpu_s,
        sent_bytes=1_020_000,
        uplink_bytes=None,
        peak_bytes=100,
        first_loss=9.0,
        last_loss=8.5,
        recorded_bytes={"dp": 1_000_000},
    )
    return Contest(logs=folder, size=TINY, rounds={OURS: [taken], "quick": [taken]})


def test_a_tie_is_enough_at_stage_0_only_where_the_peer_is_at_the_limit(tmp_path: Path) -> None:
    alone = rows(
        {"alone": _contest(2.0 * min(2, os.cpu_count() or 1) / 2, 2.0, tmp_path).rounds[OURS]}
    )

    def met(mode: str, step_s: float, cpu_s: float, *, own_module: bool = False) -> list[bool]:
        heats = [_contest(step_s, cpu_s, tmp_path)]
        found = mode_verdicts(ZERO_MODES[mode], own_module, heats, alone)
        return [good for _, good in found]

    assert met("zero0-2", 1.05, 2.1) == [True, True, True, True]
    assert met("zero1-2", 1.05, 2.1)[0] is False
    assert met("zero0-2", 1.15, 2.1)[0] is False
    assert met("zero0-2", 1.05, 2.1, own_module=True)[0] is False


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
    line, same = said_line(mode, TINY, taken[0].recorded_bytes or {})
    assert same, line
    assert not said_line(mode, TINY, {"dp": 1})[1]
    assert taken[0].last_loss is not None
    assert taken[0].first_loss is not None
    assert taken[0].last_loss < taken[0].first_loss
