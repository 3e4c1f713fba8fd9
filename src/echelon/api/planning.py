"""`ec.plan`: a run file or preset becomes a Plan; a model and a cluster become the best one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.planner.request import Objective


def plan(
    run: str | Path,
    *,
    cluster: str | None = None,
    settings: Sequence[str] = (),
    pins: Sequence[str] = (),
    objective: Objective | None = None,
) -> Plan:
    """Return the plan of a run.toml or a preset, checked by every rule, or the best one.

    `cluster` is a preset such as "8xh100"; `settings` are "table.key=value", as after `--set`. The
    preset of a model (or a config.json) says nothing of a layout: on a cluster it is searched for,
    and so is any other where there are `pins` such as "tp=8", or an `objective` ("time",
    "throughput", "devices"). Raises ConfigError with every problem that there is.
    """
    from echelon.config.kinds import toml_text
    from echelon.config.load import load_job

    if pins or objective is not None or (cluster is not None and _is_model(run)):
        return _searched(run, cluster, settings, pins, objective or "time")
    over = [] if cluster is None else [f"cluster.preset={toml_text(cluster)}"]
    return load_job(run, [*over, *settings]).plan


def _is_model(run: str | Path) -> bool:
    from echelon.config.presets import preset_names
    from echelon.planner.request import NICKNAMES, is_hf_config

    models = {*preset_names("models"), *NICKNAMES} - set(preset_names("runs"))
    return str(run) in models or is_hf_config(run)


def _searched(
    run: str | Path,
    cluster: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    objective: Objective,
) -> Plan:
    from echelon.planner.request import Aim, make_request
    from echelon.planner.search import search
    from echelon.planner.unfit import why_nothing

    aim = Aim(objective=objective, top=1)
    answer = search(make_request(run, cluster=cluster, settings=settings, pins=pins, aim=aim))
    if answer.interrupted:
        raise KeyboardInterrupt
    if answer.best is None:
        raise why_nothing(answer)
    assert answer.best.plan is not None
    return answer.best.plan
