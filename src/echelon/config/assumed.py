# SPDX-License-Identifier: Apache-2.0
"""Defaults of a run that pages list: the batch of a model's preset, dtypes that follow devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.config.job import Job
from echelon.config.presets import read_extendable

SEQUENCES_KEY, LENGTH_KEY = "batch.global_sequences", "batch.sequence_length"
DTYPE_KEY = "precision.parameters"
_PRESET = "preset "
_DERIVED = "derived: "


def assumed_of_job(job: Job) -> tuple[str, ...]:
    """Assumptions about the batch and the dtypes of a run, as sentences."""
    sources = {row.key: row.source for row in job.sources}
    dtypes = sources[DTYPE_KEY]
    derived = (dtypes.removeprefix(_DERIVED),) if dtypes.startswith(_DERIVED) else ()
    return (*assumed_batch(sources), *derived)


def assumed_batch(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the parts of the batch that come from a preset of a model, by sources of settings."""
    presets = {
        key: source
        for key in (SEQUENCES_KEY, LENGTH_KEY)
        if _is_model_preset(source := sources.get(key, ""))
    }
    words = {SEQUENCES_KEY: "the global batch", LENGTH_KEY: "the sequence length"}
    if len(presets) == len(words):
        yield f"the batch (of {presets[LENGTH_KEY]})"
        return
    for key, source in presets.items():
        yield f"{words[key]} (of {source})"


def _is_model_preset(source: str) -> bool:
    """True if the source is a preset of a model, which nobody tuned for a run."""
    if not source.startswith(_PRESET):
        return False
    preset = read_extendable(source.removeprefix(_PRESET))
    return preset is not None and preset.kind == "models"
