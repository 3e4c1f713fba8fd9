"""`ec.compare`: two plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.planner.compare import Comparison


def compare(a: str | Path | Plan, b: str | Path | Plan) -> Comparison:
    """Return what differs between two plans, and what their ranks hold and send.

    Each is a plan, a run.toml or preset, a plan.json, or the folder of a run. Raises ConfigError
    where one cannot be read.
    """
    from echelon.api.exporting import read_plan
    from echelon.planner.compare import compare_plans

    plans = [one if isinstance(one, Plan) else read_plan(one)[0] for one in (a, b)]
    return compare_plans(*plans)
