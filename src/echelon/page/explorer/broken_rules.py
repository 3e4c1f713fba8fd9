# SPDX-License-Identifier: Apache-2.0
"""Rules that the controls of the explorer break: the finders of a run, compiled for the page.

The finders (`config/rules/`) read a View of settings; here they read a View of the controls. So the
page has the rules, their arithmetic and their words from where the command line has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.config.entries import Entry
from echelon.config.rules.context import (
    CONTEXT_EFFECT_FINDERS,
    ulysses_divides_cp,
    ulysses_divides_heads,
)
from echelon.config.rules.experts import (
    EXPERT_MESH_FINDERS,
    chunk_violations,
    expert_settings_of_dense_model,
    two_hop_violations,
)
from echelon.config.rules.mesh import MESH_FINDERS, mesh_fits_cluster, mesh_settings_without_effect
from echelon.config.rules.pipeline import layers_fill_stages, schedule_fits
from echelon.config.rules.precision import (
    fp8_block_divides,
    fp8_device,
    fp8_gather,
    fp8_gathers_at_once,
)
from echelon.config.rules.servers import (
    servers_hold_dense_models,
    servers_split_samples,
    servers_update_elements,
)
from echelon.config.rules.training import recompute_settings_without_effect, recomputed_operators
from echelon.config.rules.violations import find_violations
from echelon.config.rules.zero import (
    INT8_FINDERS,
    offload_needs_stage,
    reduce_needs_nodes,
    secondary_needs_nodes,
    shards_need_stage,
    stage_3_effects,
    zero_shares_out,
)
from echelon.config.view import View
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.messages.plurals import in_singular
from echelon.page.explorer.controls import Controls, Record, settings_of_controls

FINDERS_OF_CONTROLS = (
    *MESH_FINDERS,
    mesh_settings_without_effect,
    servers_split_samples,
    servers_update_elements,
    servers_hold_dense_models,
    schedule_fits,
    layers_fill_stages,
    zero_shares_out,
    shards_need_stage,
    stage_3_effects,
    offload_needs_stage,
    secondary_needs_nodes,
    reduce_needs_nodes,
    ulysses_divides_cp,
    ulysses_divides_heads,
    *CONTEXT_EFFECT_FINDERS,
    recompute_settings_without_effect,
    recomputed_operators,
    fp8_block_divides,
    fp8_gathers_at_once,
    fp8_device,
    fp8_gather,
    *INT8_FINDERS,
    *EXPERT_MESH_FINDERS,
    expert_settings_of_dense_model,
    two_hop_violations,
    chunk_violations,
    mesh_fits_cluster,
)
"""Finders of the rules that controls can break: a test asks all finders of a run."""
PARTS_OF_MODELS = ("latent", "experts")
"""Parts of a shape that are tables of settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenControls:
    """A rule that the controls break, and its arithmetic."""

    rule: str
    message: str


def broken_rules(controls: Controls, model: Record, cluster: Record) -> list[BrokenControls]:
    """Rules that a run of the controls breaks; none if it can be planned."""
    view = view_of_controls(controls, model, cluster)
    return [
        BrokenControls(rule=violation.broken_rule[0], message=in_singular(violation.message))
        for violation in find_violations(view, FINDERS_OF_CONTROLS)
    ]


def view_of_controls(controls: Controls, model: Record, cluster: Record) -> View:
    """Settings of the controls, of their model and of their cluster."""
    entries = {key: Entry(value=value, source="") for key, value in _model_settings(model)}
    for table, values in settings_of_controls(controls, model, cluster).items():
        for name, value in values.items():
            entries[f"{table}.{name}"] = Entry(value=value, source="")
    return View(entries=entries, wrong=frozenset(), cluster=_cluster(cluster))


def _model_settings(model: Record) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a model by their keys."""
    for name, value in model["shape"].items():
        if name not in PARTS_OF_MODELS:
            yield f"model.{name}", "none" if value is None else value
        elif value is not None:
            for part, number in value.items():
                yield f"model.{name}.{part}", "none" if number is None else number


def _cluster(record: Record) -> Cluster:
    """Cluster of a record, with all that rules read."""
    return Cluster(
        name=record["name"],
        device=Device(
            name=record["device"],
            memory_bytes=record["memory_bytes"],
            memory_bandwidth=0.0,
            peak_flops=record["peaks"],
        ),
        devices_per_node=record["devices_per_node"],
        nodes=record["nodes"],
        links=tuple(
            Link(
                name=link["name"],
                degree=link["degree"],
                bandwidth=link["bandwidth"],
                latency_s=link["latency_s"],
            )
            for link in record["links"]
        ),
        backend="nccl" if record["gpus"] else "gloo",
    )
