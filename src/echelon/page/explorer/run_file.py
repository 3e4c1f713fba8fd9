# SPDX-License-Identifier: Apache-2.0
"""The settings that the controls say, and the run file of these: compiled for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.core.choices.context_kinds import kinds_with_degree
from echelon.core.settings.value_types import toml_text
from echelon.page.explorer.controls import OPERATORS, PLAIN, PRECISION_SETTINGS, Controls, Record

WITH_DEGREE = tuple(kinds_with_degree())
"""Context kinds whose degree would be chosen where a run file does not say it."""

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
ALWAYS_SAID = ("ep", "virtual")
"""Controls that a run file says even where they are as they would be by themselves."""


def settings_of_controls(
    controls: Controls, model: Record, cluster: Record
) -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of the controls' run file; what is as it is by itself is not said."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": model["name"]},
        "cluster": {"preset": cluster["name"]},
    }
    for table, name, control in SETTINGS_OF_CONTROLS:
        value = getattr(controls, control)
        if control == "precision":
            tables[table] = {key: one for key, one in PRECISION_SETTINGS[value].items()}
        elif _is_said(controls, control, value):
            said = [*OPERATORS[value]] if control == "operators" else value
            tables.setdefault(table, {})[name] = said
    return tables


def _is_said(controls: Controls, control: str, value: object) -> bool:
    """Return whether a run file has the setting of a control."""
    if control in ALWAYS_SAID or control not in PLAIN or value != PLAIN[control]:
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
