# SPDX-License-Identifier: Apache-2.0
"""A Plan seen as settings: every setting of a run.toml that would give it again.

`config/load.py` goes the other way. So one set of rules is asked of both
(`config/rules/finders.py`), and `interop/plan_settings.py` writes run files.
"""

from __future__ import annotations

from echelon.config.derived.experts import STAGE_KEY
from echelon.config.entries import Entry
from echelon.config.model.settings import PARTS
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.core.settings.configured import configured_fields, value_of_setting

LAYOUT_TABLES = ("mesh", "zero", "recompute", "context", "experts", "kernels", "collectives")
"""Tables whose settings are the fields of a record of the layout of the same name."""


def view_from_plan(plan: Plan) -> View:
    """Return the View of a plan, in which nothing is left to us and no origin is known."""
    found = plan_settings(plan)
    if plan.model.experts is None and plan.layout.experts.zero_stage == 0:
        found[STAGE_KEY] = "auto"  # What it is where there are no experts.
    entries = {key: Entry(value=value, source="") for key, value in found.items()}
    return View(entries=entries, cluster=plan.cluster, is_resolved=True)


def plan_settings(plan: Plan) -> dict[str, object]:
    """Return every setting of a plan but those that name files, as it stands in a run.toml."""
    numbers, layout = plan.mathematics, plan.layout
    found = model_settings(plan.model) | {"train.run_name": plan.name}
    for table in LAYOUT_TABLES:
        found |= settings_under(table, getattr(layout, table))
    for table in ("precision", "optimizer"):
        found |= settings_under(table, getattr(numbers, table))
    if numbers.local_sgd.active:
        found |= settings_under("local_sgd", numbers.local_sgd)
    found |= settings_under("experts", numbers.balance)
    found |= settings_under("servers", numbers.updates)
    found |= {
        "servers.count": layout.mesh.servers,
        "mesh.sequence_parallel": layout.sequence_parallel,
        "mesh.tp_overlap": layout.tp_overlap,
        "precision.fp8_gradients": numbers.precision.fp8_gradients
        if numbers.precision.is_fp8
        else "auto",
        "zero.reshard_after_forward": "always" if layout.zero.reshard_after_forward else "never",
        "zero.offload_dir": layout.zero.offload_dir or "none",
        "zero.int8_block": numbers.precision.int8_block or SETTINGS["zero.int8_block"].default,
        "pipeline.schedule": layout.pipeline.schedule,
        "pipeline.virtual_stages": layout.pipeline.virtual_stages,
        "pipeline.stages": [list(stage) for stage in layout.pipeline.stages],
        "batch.global_sequences": numbers.global_sequences,
        "batch.microbatch_sequences": layout.microbatch_sequences,
        "batch.sequence_length": numbers.sequence_length,
        "batch.documents": numbers.documents,
        "train.seed": numbers.seed,
        "train.steps": numbers.optimizer.total_steps,
    }
    return {key: found[key] for key in SETTINGS if key in found}


def model_settings(model: ModelShape) -> dict[str, object]:
    """Return every setting of a model."""
    found = settings_under("model", model)
    for part in (*PARTS, "rotary", "multipliers"):
        found |= settings_under(f"model.{part}", getattr(model, part))
    found |= settings_under("lora", model.lora)
    return {key: found[key] for key in SETTINGS if key in found}


def settings_under(table: str, value: object) -> dict[str, object]:
    """Return the fields of a record as settings of a table; none where there is no record."""
    if value is None:
        return {}
    keys = {name: f"{table}.{key}" for name, key, _ in configured_fields(type(value))}
    return {
        key: value_of_setting(SETTINGS.get(key), getattr(value, name)) for name, key in keys.items()
    }
