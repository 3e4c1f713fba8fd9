# SPDX-License-Identifier: Apache-2.0
"""Defaults of a run that a search is about: its batch, and dtypes that suit the devices."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.automatic import default_precision
from echelon.config.cluster.settings import read_cluster
from echelon.config.entries import DEFAULT, Entry
from echelon.config.job import assumed_batch
from echelon.config.model.settings import derive_model, expand_model
from echelon.config.setting_layers import SettingLayers
from echelon.config.settings.schema import CLUSTER_SOURCES
from echelon.config.view import View
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError
from echelon.interop.tools import abilities_of_trainer

TOKENS_OF_A_BATCH = 4 * 2**20
"""Tokens of a global batch by default."""
_LONGEST_SEQUENCE = 8192
"""Tokens of a sequence by default, if the model has the positions."""


def complete_run(gathered: SettingLayers, model: str, trainer: str) -> Iterator[str]:
    """Put defaults under the layers of a run, and yield each as text."""
    merged = gathered.merged()
    if gathered.incomplete or gathered.problems:
        raise ConfigError(gathered.problems)
    expanded, problems = expand_model(merged)
    if problems:
        raise ConfigError(problems)
    if not any(key.startswith("model.") for key in merged):
        return
    expanded = dict(expanded) | dict(derive_model(View(entries=expanded), model))
    view = View(entries=expanded)
    found: dict[str, object] = {}
    yield from assumed_batch({key: entry.source for key, entry in merged.items()})
    if not view.has("batch.sequence_length") and view.has("model.max_positions"):
        length = min(_LONGEST_SEQUENCE, view.integer("model.max_positions"))
        found["batch.sequence_length"] = length
        yield f"sequences of {length:,} tokens"
    if not view.has("batch.global_sequences"):
        length = found.get("batch.sequence_length") or view.integer("batch.sequence_length")
        assert isinstance(length, int)
        count = max(1, TOKENS_OF_A_BATCH // length)
        found["batch.global_sequences"] = count
        yield f"a global batch of {count:,} sequences ({count * length:,} tokens)"
    if not any(key.startswith("precision.") for key in merged):
        precision, text = _precision(view)
        found |= precision
        yield text
    able = abilities_of_trainer(trainer)
    fixed = {} if able is None else dict(able.settings)
    if able is not None and able.reduces_in_parameter_dtype and "precision.parameters" in found:
        fixed["precision.reduction"] = found["precision.parameters"]
    # What a trainer has no choice of.
    for key, value in fixed.items():
        if key not in expanded:
            found[key] = value
            yield f"{key} = {value}, as {trainer} has it"
    if found:
        gathered.layers.insert(0, {k: Entry(value=v, source=DEFAULT) for k, v in found.items()})


def _precision(view: View) -> tuple[dict[str, object], str]:
    """Return the dtypes that suit the devices, and their text."""
    cluster = read_cluster(view) if any(map(view.has, CLUSTER_SOURCES)) else None
    if isinstance(cluster, Cluster):
        return default_precision(view, cluster)
    return {}, "everything in fp32"
