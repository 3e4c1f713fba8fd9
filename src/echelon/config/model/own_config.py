# SPDX-License-Identifier: Apache-2.0
"""The config.json of weights in Echelon's own names: [model] of a run.toml, as JSON.

So a folder of any model says its shape, and `model.hf_config` reads it back. The model_type keeps
other libraries from taking it for a model of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, check_layer, flatten
from echelon.config.model.config_json import OWN_TABLE, OWN_TYPE
from echelon.config.model.unknown import ASSUMED_KEY
from echelon.config.settings.schema import MODEL_SOURCES
from echelon.core.errors import Problem
from echelon.core.rulebook.model import HF_CONFIG_MISSING_KEY, HF_CONFIG_VALUE

NOT_IN_OWN_CONFIG = (*MODEL_SOURCES, ASSUMED_KEY, "model.assume")
"""Settings of [model] for another source of the model, and for assumptions about one."""


def own_entries(
    config: Mapping[str, object], path: Path, set_by: str
) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of such a config.json, `path` in messages."""
    table = config.get(OWN_TABLE)
    if not isinstance(table, dict):
        problem = HF_CONFIG_MISSING_KEY.problem(
            f"{path} has no table {OWN_TABLE}, which a config.json of model_type {OWN_TYPE} needs",
            key="model.hf_config",
            set_by=set_by,
        )
        return {}, [problem]
    settings = dict(flatten(cast("dict[str, object]", table), f"{OWN_TABLE}."))
    entries, problems = check_layer(
        {
            key: Entry(value=value, source=f"{path}: {key}", folder=path.parent)
            for key, value in settings.items()
            if key not in NOT_IN_OWN_CONFIG
        }
    )
    problems += [
        HF_CONFIG_VALUE.problem(
            f"{key} has no place in a config.json of model_type {OWN_TYPE}, which holds the whole "
            "model itself",
            key="model.hf_config",
            set_by=f"{path}: {key}",
        )
        for key in NOT_IN_OWN_CONFIG
        if key in settings
    ]
    return dict(entries), problems
