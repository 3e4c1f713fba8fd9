"""Ranks are killed at random moments of saving, and what is committed always loads."""

from __future__ import annotations

from pathlib import Path

from bench.faults.saves import kill_savers


def test_kills_leave_only_loadable_checkpoints(tmp_path: Path) -> None:
    tally = kill_savers(tmp_path, ranks=2, kills=8)
    assert tally.loadable == tally.kills == 8
    assert tally.last_step >= 16
