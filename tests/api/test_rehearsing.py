"""`ec.rehearse`: of a plan, of what has one, and of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec


def test_a_plan_a_name_and_a_file_are_rehearsed(tmp_path: Path) -> None:
    plan = ec.plan("nano", settings=["mesh.tp=2"])
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    first, second = (ec.rehearse(one, workers=1) for one in (plan, file))
    assert [one.peak_bytes for one in first.ranks] == [one.peak_bytes for one in second.ranks]
    assert len(first.ranks) == 2
    assert len(ec.rehearse("nano", workers=1).ranks) == 1


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="is no plan"):
        ec.rehearse(3)  # type: ignore[arg-type]
    with pytest.raises(ec.ConfigError):
        ec.rehearse("nosuch")
