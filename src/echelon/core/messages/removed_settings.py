# SPDX-License-Identifier: Apache-2.0
"""Settings of earlier versions: what each was, and what to write instead.

A run.toml or a plan.json of an earlier version names every setting. One that is gone is read as
before where it holds the value of a run that does not use it, and is an error where it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedSetting:
    """A setting that is gone."""

    key: str
    """Its key in a run.toml: ``servers.min_workers``."""
    entry: str
    """Its place in a plan.json: ``mathematics.updates.min_workers``."""
    unused: object
    """The value of runs that do not use it."""
    message: str
    """What happens now, and why."""
    instead: tuple[str, ...]
    """What to write instead."""


_LOST_WORKERS = (
    "servers need all of their workers: a worker that is lost ends the run, as any rank does"
)
_GO_ON = (
    "echelon train run.toml --resume runs/NAME, from the last checkpoint",
    "local_sgd.every with local_sgd.min_islands: a run that goes on without lost islands",
)

REMOVED_SETTINGS: Mapping[str, RemovedSetting] = {
    setting.key: setting
    for setting in (
        RemovedSetting(
            key="servers.min_workers",
            entry="mathematics.updates.min_workers",
            unused="all",
            message=_LOST_WORKERS,
            instead=_GO_ON,
        ),
        RemovedSetting(
            key="servers.restarts",
            entry="mathematics.updates.restarts",
            unused=1,
            message=_LOST_WORKERS,
            instead=_GO_ON,
        ),
        RemovedSetting(
            key="threads.replicas",
            entry="layout.threads.replicas",
            unused=1,
            message="a plan splits over ranks, each a process, and no longer over threads of one",
            instead=(
                "mesh.dp_replicate, for as many ranks",
                "ec.threaded(module, replicas=N), for a module of your own on threads",
            ),
        ),
    )
}
"""By key."""

_BY_ENTRY = {setting.entry: setting for setting in REMOVED_SETTINGS.values()}


def without_removed(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of a plan.json without those that are gone and were not used.

    ValueError names the setting of one that was used.
    """
    left: dict[str, Any] = {}
    for name, value in entries.items():
        place = f"{prefix}{name}"
        removed = _BY_ENTRY.get(place)
        if removed is not None:
            if value != removed.unused:
                raise ValueError(f"{removed.key}, which it uses, was removed: {removed.message}")
        elif isinstance(value, dict) and value:
            # A table whose settings are all gone is gone, too.
            if inner := without_removed(cast("dict[str, Any]", value), f"{place}."):
                left[name] = inner
        else:
            left[name] = value
    return left
