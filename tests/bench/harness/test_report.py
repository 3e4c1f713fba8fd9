"""The arithmetic of a comparison: medians, the fastest peer, limits and targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.harness.catalogue import OURS
from bench.harness.ranks import Measurement
from bench.harness.report import (
    TARGET_FAR_FROM_LIMIT,
    Rounds,
    Verdict,
    fastest_peer,
    rows,
    table,
    target,
    unequal_losses,
    verdicts_of,
)
from bench.harness.spec import MODES


def _took(step_s: float, cpu_s: float = 1.0, peak_bytes: int = 2_000_000) -> Measurement:
    return Measurement(
        step_s=step_s,
        cpu_s=cpu_s,
        sent_bytes=1_020_000,
        uplink_bytes=None,
        peak_bytes=peak_bytes,
        first_loss=9.0,
        last_loss=8.5,
        recorded_bytes={"dp": 1_000_000},
    )


def _lean(*heats: Rounds) -> dict[str, Verdict]:
    found = [rows(heat) for heat in heats]
    told = verdicts_of(found, seconds_target=TARGET_FAR_FROM_LIMIT, lean=True)
    return {one.quantity: one for one in told}


def test_a_row_holds_medians_and_the_spread() -> None:
    (row,) = rows({"peer": [_took(1.0), _took(3.0), _took(1.2)]})
    assert (row.step_s, row.rounds) == (1.2, 3)
    assert row.spread == pytest.approx(2.0 / 1.2)


def test_the_fastest_peer_is_never_ourselves() -> None:
    found = rows({OURS: [_took(0.1)], "slow": [_took(3.0)], "fast": [_took(2.0)]})
    peer = fastest_peer(found)
    assert peer is not None
    assert peer.label == "fast"


@pytest.mark.parametrize(
    ("peer", "limit", "wanted"),
    [(1.05, 1.0, 1.00), (1.10, 1.0, 1.00), (1.11, 1.0, 0.95), (2.0, None, 0.95)],
)
def test_the_target_depends_on_what_the_peer_leaves(
    peer: float, limit: float | None, wanted: float
) -> None:
    assert target(peer, limit) == wanted


def test_verdicts_compare_wall_and_cpu_with_the_fastest_peer() -> None:
    found = rows({OURS: [_took(0.96, 2.0)], "fast": [_took(1.0, 2.5)], "slow": [_took(1.5, 1.0)]})
    wall, cpu = verdicts_of([found], limits=(0.5, 2.4))
    assert (wall.ratio, wall.target, wall.met) == (pytest.approx(0.96), 0.95, False)
    assert (cpu.ratio, cpu.target, cpu.met) == (pytest.approx(0.8), 1.00, True)
    assert "MISSED" in wall.line()
    assert "+100 % above" in wall.line()


def test_nothing_is_compared_without_a_peer() -> None:
    assert verdicts_of([rows({OURS: [_took(1.0)]})]) == []
    assert list(_lean({OURS: [_took(1.0)]})) == ["wire"]


def test_the_table_also_says_what_did_not_run() -> None:
    text = table(MODES["dp2"], rows({"peer": [_took(1.0)]}), {"other": "no such module"})
    row = (
        "| dp2 | peer | 1.000 | 1.000 | 0% | 1.000 | 1.000 | 1.0 | 1.0 | 2 | 9.0000 -> 8.5000 | 1 |"
    )
    assert row in text
    assert "other | did not run: no such module" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_limits_know_bubbles_and_cores() -> None:
    assert MODES["dp2"].limit_s(6.0, cores=2) == 3.0
    assert MODES["pp2"].limit_s(6.0, cores=2) == 3.75
    assert MODES["dp2xpp2"].limit_s(6.0, cores=2) == 3.0
    assert MODES["dp2xpp2"].limit_s(6.0, cores=8) == 1.5


def test_seconds_are_compared_with_the_fastest_and_memory_with_the_leanest() -> None:
    fat, lean = _took(1.0, 2.0, 3_000_000), _took(2.0, 4.0, 1_000_000)
    found = _lean({OURS: [_took(0.9, 1.8)], "fat": [fat], "lean": [lean]})
    assert (found["wall"].peer, found["wall"].target, found["wall"].met) == ("fat", 0.95, True)
    memory = found["peak memory"]
    assert (memory.peer, memory.ratio, memory.met) == ("lean", 2.0, False)
    assert (found["CPU"].met, found["wire"].met) == (True, True)


def test_the_heat_in_which_we_do_worst_counts() -> None:
    found = _lean(
        {OURS: [_took(0.8)], "slow": [_took(1.0)]},
        {OURS: [_took(0.8)], "fast": [_took(0.82, 1.5)]},
    )
    assert (found["wall"].peer, found["CPU"].peer) == ("fast", "fast")
    assert found["wall"].ratio == pytest.approx(0.8 / 0.82)
    assert found["CPU"].ratio == pytest.approx(1.0 / 1.5)


def test_losses_of_one_module_are_equal_or_named() -> None:
    other = replace(_took(1.0), last_loss=8.51)
    assert unequal_losses(rows({OURS: [_took(1.0)], "same": [_took(1.0)]})) == []
    assert unequal_losses(rows({OURS: [_took(1.0)], "other": [other]})) == [
        "last loss: other 8.51, Echelon 8.5"
    ]
