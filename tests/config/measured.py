"""A file of measured times, for tests: what `echelon calibrate RUN` would have written."""

from __future__ import annotations

from pathlib import Path

from echelon.config.files.measurements import PASSES, UNITS, TimesFile, fitted_settings
from echelon.core.plan import Plan


def times_file(plan: Plan, path: Path, *, head: float = 1.0, device: str = "cpu") -> Path:
    """Write times of a head as long as `head` blocks."""
    seconds = {
        unit: {name: scale * (1 + index) for index, name in enumerate(PASSES)}
        for unit, scale in zip(UNITS, (0.0, 1e-3, 1e-3 * head), strict=True)
    }
    times = TimesFile(
        model=plan.model.name,
        fits=fitted_settings(plan),
        seconds=seconds,
        device=device,
        spread=dict.fromkeys(UNITS, 0.0),
    )
    path.write_text(times.to_json())
    return path
