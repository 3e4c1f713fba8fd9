"""What nobody said of a run: the batch of a model's preset, and dtypes that follow devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.config.job import Job
from echelon.config.presets import read_extendable

SEQUENCES_KEY, LENGTH_KEY = "batch.global_sequences", "batch.sequence_length"
DTYPE_KEY = "precision.parameters"
_PRESET = "preset "
_DERIVED = "derived: "


def assumed_of_job(job: Job) -> tuple[str, ...]:
    """Return what was assumed of the batch and the dtypes of a run."""
    sources = {row.key: row.source for row in job.sources}
    numbers = job.plan.mathematics
    batch = assumed_batch(sources, numbers.global_sequences, numbers.sequence_length)
    dtypes = sources[DTYPE_KEY]
    derived = (dtypes.removeprefix(_DERIVED),) if dtypes.startswith(_DERIVED) else ()
    return (*batch, *derived)


def assumed_batch(sources: Mapping[str, str], sequences: int, length: int) -> Iterator[str]:
    """Yield what a preset of a model says of the batch; `sources` say where settings are from."""
    presets = {
        key: source
        for key in (SEQUENCES_KEY, LENGTH_KEY)
        if _is_model_preset(source := sources.get(key, ""))
    }
    each = {
        SEQUENCES_KEY: f"a global batch of {sequences:,} sequences",
        LENGTH_KEY: f"sequences of {length:,} tokens",
    }
    if len(presets) == len(each):
        yield f"{each[SEQUENCES_KEY]} x {length:,} tokens ({presets[LENGTH_KEY]})"
        return
    for key, source in presets.items():
        yield f"{each[key]} ({source})"


def _is_model_preset(source: str) -> bool:
    """Return whether a setting comes from a preset of a model, which nobody has tuned for a run."""
    if not source.startswith(_PRESET):
        return False
    preset = read_extendable(source.removeprefix(_PRESET))
    return preset is not None and preset.kind == "models"
