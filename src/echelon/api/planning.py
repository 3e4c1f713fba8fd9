"""`ec.plan`: a run file or preset becomes a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.core.plan import Plan


def plan(run: str | Path, *, cluster: str | None = None, settings: Sequence[str] = ()) -> Plan:
    """Return the plan of a run.toml or a preset, checked by every rule.

    `cluster` is a preset such as "8xh100"; `settings` are "table.key=value", as after `--set`.
    Raises ConfigError with every problem that there is.
    """
    from echelon.config.kinds import toml_text
    from echelon.config.load import load_job

    over = [] if cluster is None else [f"cluster.preset={toml_text(cluster)}"]
    return load_job(run, [*over, *settings]).plan
