"""Cases as processes: they answer, take turns, and say why when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.catalogue import chosen_modes, ours, own_module, peers, single
from bench.harness.hosts import (
    PREFIX,
    can_make_namespaces,
    linked_hosts,
    one_host,
    remove_leftovers,
)
from bench.harness.plans import bench_plan
from bench.harness.ranks import CaseFailed, RankGroup
from bench.harness.spec import MODES, MODULE_MODES, SIZES, Mode, Settings
from bench.wire import wire_bytes
from echelon.cost.bytes.sent import bytes_sent_by_axis

TINY = SIZES["tiny"]
needs_root = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and unshare")


def test_settings_cross_processes_as_json() -> None:
    settings = ours(MODES["tp2sp"]).settings(TINY)
    assert Settings.from_json(settings.to_json()) == settings


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="tp3"):
        chosen_modes("dp2,tp3")


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_every_mode_has_peers_and_a_plan_of_its_size(mode: Mode) -> None:
    cases = peers(mode, Path("/nowhere"), at_most=9)
    assert len(cases) >= 2
    assert len({case.label for case in cases}) == len(cases)
    plan = bench_plan(ours(mode).settings(TINY))
    assert plan.mesh.world_size == mode.world_size
    assert plan.num_microbatches == mode.microbatches


@pytest.mark.parametrize("mode", MODULE_MODES.values(), ids=lambda mode: mode.name)
def test_every_axis_of_a_module_has_peers_that_train_the_same_one(mode: Mode) -> None:
    assert chosen_modes(mode.name) == (mode,)
    found = peers(mode, Path("/nowhere"), at_most=9, own_module=True)
    others = {"bench.peers.megatron", "bench.peers.torchtitan_llama", "bench.peers.picotron"}
    assert found
    assert not others & {case.module for case in found}
    case = own_module(mode, Path("/nowhere"))
    assert case.python == Path(sys.executable)
    assert bench_plan(case.settings(TINY)).layout.pipeline.schedule == mode.schedule


@pytest.mark.slow
def test_a_module_in_stages_has_the_losses_of_one_in_one_piece(tmp_path: Path) -> None:
    losses: list[tuple[float | None, float | None]] = []
    for name in ("dp2", "pp2zb"):
        case = own_module(MODULE_MODES[name], Path("/nowhere"))
        with one_host() as host, RankGroup(case, case.settings(TINY), [host], tmp_path) as group:
            taken = group.run(warmup=0, steps=2)
        losses.append((taken.first_loss, taken.last_loss))
        assert taken.recorded_bytes
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_ranks_take_turns_and_record_the_bytes_of_the_formula(tmp_path: Path) -> None:
    mode = MODES["pp2"]
    case = ours(mode)
    settings = case.settings(TINY)
    with one_host() as host, RankGroup(case, settings, [host], tmp_path) as group:
        first = group.run(warmup=0, steps=1)
        second = group.run(warmup=1, steps=2)
        operators = group.profile(steps=1)
    plan = bench_plan(settings)
    formula: dict[str, int] = {}
    for rank in range(mode.world_size):
        for axis, count in bytes_sent_by_axis(plan, rank).items():
            formula[axis] = formula.get(axis, 0) + count
    assert second.recorded_bytes == formula
    assert first.first_loss == pytest.approx(6.25, abs=0.2)
    assert second.last_loss is not None
    assert second.last_loss < 6.25
    assert second.cpu_s > 0
    assert any("mm" in str(row[0]) for row in operators)


@pytest.mark.slow
def test_a_case_that_raises_is_told_in_its_own_words(tmp_path: Path) -> None:
    case = replace(ours(MODES["dp2"]), module="bench.no_such_framework")
    with (
        one_host() as host,
        pytest.raises(CaseFailed, match="no_such_framework"),
        RankGroup(case, case.settings(TINY), [host], tmp_path),
    ):
        raise AssertionError("a case without a module must not start")


def test_a_case_whose_process_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    case = replace(single(Path("/nowhere")), python=Path(sys.executable), module="this")
    broken = replace(case, python=Path("/bin/false"))
    with (
        one_host() as host,
        pytest.raises(CaseFailed, match="rank 0 ended with 1"),
        RankGroup(broken, broken.settings(TINY), [host], tmp_path),
    ):
        raise AssertionError("a case without an interpreter must not start")


@pytest.mark.slow
@needs_root
def test_the_wire_carries_little_more_than_is_recorded() -> None:
    wire, recorded = wire_bytes(MODES["dp2"], SIZES["quick"], steps=1)
    assert sum(recorded.values()) <= wire <= 1.03 * sum(recorded.values())


@needs_root
def test_hosts_are_gone_afterwards_even_when_something_fails() -> None:
    def names() -> set[str]:
        return {name for name in os.listdir("/run/netns") if name.startswith(PREFIX)}

    before = names() if Path("/run/netns").exists() else set()
    with pytest.raises(ZeroDivisionError), linked_hosts(2) as hosts:  # noqa: PT012
        assert len(names() - before) == 3
        assert hosts[1].sent_bytes() is not None
        raise ZeroDivisionError
    assert names() == before


@needs_root
def test_leftovers_of_a_dead_run_are_removed_and_those_of_a_live_one_are_not() -> None:
    with one_host() as host:
        assert host.namespace is not None
        dead = f"{PREFIX}999999999-abc-only"
        subprocess.run(["ip", "netns", "add", dead], check=True)
        assert dead in remove_leftovers()
        assert host.sent_bytes() is not None
