# SPDX-License-Identifier: Apache-2.0
"""Settings of the controls, and their run file: compiled for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.core.choices.context_kinds import kinds_with_degree
from echelon.core.settings.value_types import toml_text
from echelon.page.explorer.controls import OPERATORS, PLAIN, PRECISION_SETTINGS, Controls, Record

WITH_DEGREE = tuple(kinds_with_degree())
"""Context kinds whose degree a run file without one leaves open."""

SETTINGS_OF_CONTROLS = (
    *(("mesh", name, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
    *(("mesh", name, name) for name in ("sequence_parallel", "tp_overlap")),
    ("servers", "count", "servers"),
    ("zero", "stage", "zero"),
    ("zero", "reshard_after_forward", "reshard"),
    *(("zero", name, name) for name in ("secondary", "gather", "reduce")),
    *(("zero", name, name) for name in ("optimizer_offload", "parameter_offload")),
    ("pipeline", "schedule", "schedule"),
    ("pipeline", "virtual_stages", "virtual"),
    ("batch", "global_sequences", "sequences"),
    ("batch", "microbatch_sequences", "microbatch"),
    ("batch", "sequence_length", "length"),
    ("precision", "", "precision"),
    ("optimizer", "kind", "optimizer"),
    ("recompute", "policy", "recompute"),
    ("recompute", "every", "every"),
    ("recompute", "operators", "operators"),
    ("context", "kind", "context"),
    ("context", "ulysses_degree", "ulysses"),
    *(("experts", name, name) for name in ("expert_tp", "dispatch", "chunks")),
)
"""Table and name of each setting, and its control; a precision is several settings."""
ALWAYS_WRITTEN = ("ep", "virtual")
"""Controls that a run file has even at their defaults."""


def settings_of_controls(
    controls: Controls, model: Record, cluster: Record
) -> Mapping[str, Mapping[str, Any]]:
    """Tables of the controls' run file, without settings at their defaults."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": model["name"]},
        "cluster": {"preset": cluster["name"]},
    }
    for table, name, control in SETTINGS_OF_CONTROLS:
        value = getattr(controls, control)
        if control == "precision":
            tables[table] = {key: word for key, word in PRECISION_SETTINGS[value].items()}
        elif _is_written(controls, control, value):
            listed = [*OPERATORS[value]] if control == "operators" else value
            tables.setdefault(table, {})[name] = listed
    return tables


def _is_written(controls: Controls, control: str, value: object) -> bool:
    """True if the run file has the setting of a control."""
    if control in ALWAYS_WRITTEN or control not in PLAIN or value != PLAIN[control]:
        return True
    if control == "reshard":
        return controls.zero == 3
    return control == "ulysses" and controls.context in WITH_DEGREE


def run_text(controls: Controls, model: Record, cluster: Record) -> str:
    """Return the run file of the controls, as TOML."""
    tables = settings_of_controls(controls, model, cluster)
    return "\n".join([_table_text(name, values) for name, values in tables.items()])


def _table_text(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_text(value)}\n" for key, value in values.items()]
    return f"[{name}]\n{''.join(lines)}"
