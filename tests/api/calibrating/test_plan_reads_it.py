"""What a calibration measures is what a plan is timed with: each constant changes its seconds.

Of the `launch_s` of a device a dense step reads nothing: it reads the `host_s` of the trainer,
which the fit of steps looks for from `launch_s` on. Steps with experts read it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from echelon.config.cluster.file import cluster_toml
from echelon.config.load import load_job
from echelon.core.cluster import NOT_MEASURED, Cluster, Efficiency, Link
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import step_seconds

LAYOUT = ("mesh.tp=4", "mesh.dp_shard=4", "zero.stage=1", "batch.microbatch_sequences=1")
DENSE = ("llama3-8b", "model.vocab=128004")
"""Rows of a vocabulary that are not aligned: their rate is measured, too."""
EXPERTS = ("mixtral-8x7b", "mesh.ep=4")
CHANGED = {"tile": 48, "units": 50, "half_depth": 900.0, "launch_s": 1e-6}
"""Constants that are no shares, and what they are changed to."""


@cache
def _cluster() -> Cluster:
    """Return a cluster as `echelon calibrate` writes it: its numbers are its own, of no table."""
    named = load_job(DENSE[0], ["cluster.preset=16xh100", *LAYOUT]).plan.cluster
    return replace(named, device=replace(named.device, measured=NOT_MEASURED))


def _seconds(cluster: Cluster, path: Path, model: tuple[str, str]) -> float:
    """Return the seconds of a step on the cluster that a file of it describes."""
    path.write_text(cluster_toml(cluster))
    plan = load_job(model[0], [f"cluster.file={path}", model[1], *LAYOUT]).plan
    return first_number(step_seconds(cost_inputs_from_plan(plan)).total)


@pytest.mark.parametrize("name", [item.name for item in fields(Efficiency)])
def test_every_constant_of_a_device_changes_a_step(name: str, tmp_path: Path) -> None:
    cluster = _cluster()
    efficiency = cluster.device.efficiency
    changed = CHANGED.get(name, 0.8 * getattr(efficiency, name))
    device = replace(cluster.device, efficiency=replace(efficiency, **{name: changed}))
    model = EXPERTS if name == "launch_s" else DENSE
    before = _seconds(cluster, tmp_path / "before.toml", model)
    after = _seconds(replace(cluster, device=device), tmp_path / "after.toml", model)
    assert after != before


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("name", ["bandwidth", "latency_s", "efficiency", "half_bytes"])
def test_every_constant_of_a_link_changes_a_step(name: str, tier: int, tmp_path: Path) -> None:
    cluster = _cluster()
    links = [replace(link, efficiency=0.5, half_bytes=1e6) for link in cluster.links]
    before = _seconds(replace(cluster, links=tuple(links)), tmp_path / "before.toml", DENSE)
    links[tier] = _worse(links[tier], name)
    changed = replace(cluster, links=tuple(links))
    assert _seconds(changed, tmp_path / "after.toml", DENSE) > before


def _worse(link: Link, name: str) -> Link:
    factor = 0.5 if name in ("bandwidth", "efficiency") else 20.0
    return replace(link, **{name: factor * getattr(link, name)})
